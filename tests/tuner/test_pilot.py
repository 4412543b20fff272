"""The pilot that decides what one value of a study's test is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from autotune.bench.eprocess import Unit
from autotune.bench.record import Round
from autotune.domain.verdict import FailureKind, UnprovenReason
from autotune.hardware.collect import collect
from autotune.routes import registry
from autotune.space.engine import load_engine
from autotune.space.grid import expand
from autotune.space.space import load_file
from autotune.store.database import open_database
from autotune.tuner import pilot as pilot_module
from autotune.tuner.pilot import Pilot, run_pilot
from autotune.tuner.run import open_run
from autotune.tuner.target import Target
from autotune.worker.base import Broken, Completed, Failed, JobError, Outcome
from autotune.worker.jobs import TimeJob
from autotune.worker.worker import Worker
from tests.console import TINY
from tests.tuner.scripted import NamedRoute, routes, target

# Ratios as they come in a row of rounds.
WHITE = Random(3).gauss


@dataclass
class PilotWorker:
    """Gives rounds whose log ratios follow ``noise(previous)``, or ends as ``ends`` says, job by job."""

    noise: Callable[[float], float]
    ends: list[Outcome] = field(default_factory=list)
    jobs: list[TimeJob] = field(default_factory=list)

    def run(
        self, job: TimeJob, *, timeout_s: float, step_timeout_s: float, on_event: Callable[[Any], Any]
    ) -> Outcome:
        self.jobs.append(job)
        if self.ends:
            return self.ends.pop(0)
        a, b = job.routes
        rounds, value = [], 0.0
        for index in range(job.settings["max_rounds"]):
            value = self.noise(value)
            times = {a: 10.0 * (1.0 + value), b: 10.0}
            rounds.append(Round(index, (a, b), times, times, {a: 1.0, b: 1.0}, {a: 1, b: 1}).to_dict())
        on_event({"rounds": rounds})
        return Completed(len(rounds))


def white(previous: float) -> float:
    return WHITE(0.0, 0.01)


def drifting(previous: float) -> float:
    return 0.9 * previous + WHITE(0.0, 0.01)


def pilot_of(worker: PilotWorker, **more: NamedRoute) -> Pilot:
    return run_pilot(cast(Worker, worker), target(), routes("fast", "other", **more))


def test_white_noise_leaves_the_unit_a_round() -> None:
    worker = PilotWorker(white)
    found = pilot_of(worker)
    assert found.unit is Unit.ROUND
    assert found.lag1 is not None
    assert abs(found.lag1) < 0.2
    # each column's cheapest cell before its next; the fallback against its first candidate
    assert found.rounds == 192
    assert [job.routes for job in worker.jobs] == [("torch-sdpa", "fast")] * 3
    assert [job.cell["kv_high"] for job in worker.jobs] == [64, 64, 128]
    assert {job.first_round for job in worker.jobs} == {0}
    assert found.detail.startswith("pilot of 192 rounds, 64 a cell: autocorrelation ")
    assert found.detail.endswith("so the unit of the test is a round")


def test_rounds_that_tell_about_the_next_make_blocks() -> None:
    found = pilot_of(PilotWorker(drifting))
    assert found.unit is Unit.BLOCK4
    assert found.lag1 is not None
    assert found.lag1 > 0.5
    assert found.detail.endswith("so the unit of the test is the median of 4 rounds")
    assert found.to_dict() == {
        "unit": "block4",
        "lag1": found.lag1,
        "rounds": 192,
        "detail": found.detail,
    }


def test_a_cell_that_fails_is_left_out() -> None:
    worker = PilotWorker(white, [Failed(FailureKind.CRASH, "SIGSEGV", "fast: timing")])
    assert pilot_of(worker).rounds == 192
    assert len(worker.jobs) == 4


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Failed(FailureKind.ILLEGAL_ACCESS, "SIGSEGV", "fast: timing"), "SIGSEGV (fast: timing)"),
        (Broken(UnprovenReason.OUT_OF_MEMORY, "no memory", ""), "no memory"),
        (JobError("ModuleNotFoundError", "No module named 'x'"), "ModuleNotFoundError: No module named 'x'"),
        (Completed(0), "it gave no rounds"),
    ],
)
def test_a_pilot_that_fails_says_so_and_leaves_a_round(end: Outcome, said: str) -> None:
    found = pilot_of(PilotWorker(white, [end] * 4))
    assert (found.unit, found.lag1, found.rounds) == (Unit.ROUND, None, 0)
    assert found.detail == f"no pilot, the unit of the test is a round: {said}"


def test_without_a_candidate_there_is_nothing_to_pilot() -> None:
    worker = PilotWorker(white)
    found = run_pilot(cast(Worker, worker), target(), routes())
    assert found.unit is Unit.ROUND
    assert "no candidate" in found.detail
    assert worker.jobs == []


def test_a_pilot_runs_once_a_study(tmp_path: Path) -> None:
    asked = []

    def pilot() -> Pilot:
        asked.append(1)
        return run_pilot(cast(Worker, PilotWorker(drifting)), target(), routes("fast"))

    with open_database(f"sqlite:///{tmp_path}/pilot.db") as database:
        for _ in range(2):
            with open_run(database, target(), routes("fast"), tuning=True, pilot=pilot) as run:
                assert run.study.unit == "block4"
                assert run.test.unit is Unit.BLOCK4
                kept = run.queue._study.user_attrs["pilot"]
                assert (kept["unit"], kept["rounds"]) == ("block4", 192)
        assert len(asked) == 1
        # reading, and a later run whose pilot would say otherwise, keep what is stored
        with open_run(database, target(), routes("fast"), tuning=False) as run:
            assert run.test.unit is Unit.BLOCK4


def test_a_study_is_not_created_by_a_pilot_that_is_interrupted(tmp_path: Path) -> None:
    def pilot() -> Pilot:
        raise KeyboardInterrupt

    with open_database(f"sqlite:///{tmp_path}/pilot.db") as database:
        with (
            pytest.raises(KeyboardInterrupt),
            open_run(database, target(), routes("fast"), tuning=True, pilot=pilot),
        ):
            pass
        with open_run(database, target(), routes("fast"), tuning=True) as run:
            assert not run.study.resumed
            assert run.study.unit == "round"


def test_a_real_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot_module, "CELLS", 1)
    facts = collect("cpu")
    place = Target(expand(load_file(TINY), load_engine("generic")), facts, "cpu", "host_mmap", seed=11)
    with Worker("cpu") as worker:
        found = run_pilot(worker, place, registry.routes("cpu"))
    assert found.rounds == 64
    assert found.lag1 is not None
    assert -1.0 <= found.lag1 <= 1.0
