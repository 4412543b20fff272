"""Lanes are threads: what they write through one database, whichever it is."""

from __future__ import annotations

from collections import Counter

import pytest

from autotune.store.database import open_database
from autotune.store.records import TrialState
from autotune.tuner.run import open_run
from tests.tuner.scripted import routes, target
from tests.tuner.scripted_lanes import LaneWorker, together


@pytest.mark.parametrize("backend", ["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_four_lanes_on_one_database(backend: str, request: pytest.FixtureRequest) -> None:
    url = "sqlite://" if backend == "memory" else request.getfixturevalue("postgres_url")
    with (
        open_database(url) as database,
        open_run(database, target(), routes("fast", "slow"), tuning=True) as run,
    ):
        workers = [LaneWorker(times={"fast": 5.0, "slow": 30.0}) for _ in range(4)]
        assert together(run, *workers).settled == 4
        decisions = run.repository.decisions(run.study)
        assert [decisions[item.cell.id].route for item in run.cells] == ["fast"] * 4
        trials = run.repository.trials(run.study)
        assert Counter(trial.state for trial in trials.values()) == {TrialState.COMPLETE: 4}
        told = run.queue._study.get_trials()
        assert sorted(trial.params["cell"] for trial in told) == [0, 1, 2, 3]
        assert {trial.value for trial in told} == {2.0}
