"""What makes a study, who stands in a line-up, and the small parts of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from autotune.domain.cell import Column
from autotune.domain.decision import Decision, Reason
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import Status
from autotune.routes.base import Family, Need, Route
from autotune.store.errors import StudyLockedError
from autotune.store.records import TrialState
from autotune.tuner import code_version as version_module
from autotune.tuner.code_version import code_version
from autotune.tuner.deadline import Deadline
from autotune.tuner.lineup import Lineup, left_out, line_up
from autotune.tuner.publish import file_name
from autotune.tuner.queue import TrialQueue, value_of
from autotune.tuner.run import OpenedRun, multiplicity, open_run, study_digest
from autotune.tuner.tuner import _kv_lens
from tests.tuner.scripted import FACTS, NamedRoute, ScriptedWorker, opened, routes, sweep, target

FASTER = Decision("fast", Reason.PROVEN_FASTER, speedup_low=1.1, speedup=1.5)
KEPT = Decision(None, Reason.NOT_FASTER)


def test_a_route_that_races_makes_another_study() -> None:
    place = target()
    one = study_digest(place, routes("fast"))
    assert one == study_digest(place, routes("fast"))
    assert one != study_digest(place, routes("fast", "other"))
    assert one != study_digest(place, routes(fast=NamedRoute("fast", version=2)))
    # one that supports none of the cells does not
    assert one == study_digest(place, routes("fast", other=NamedRoute("other", refuses="no")))
    assert multiplicity(place, routes("fast")) == 4
    assert multiplicity(place, routes("fast", "other")) == 8
    assert multiplicity(place, routes()) == 4


def test_picked_cells_are_decided_as_in_the_whole(tmp_path: Path) -> None:
    whole, fast = target(), routes("fast", "other")
    item = whole.grid.cells[1]
    part = replace(whole, grid=whole.grid.pick([item.cell.id]))
    assert [each.cell for each in part.grid.cells] == [item.cell]
    assert multiplicity(part, fast) == multiplicity(whole, fast) == 8
    # a filter that leaves the same cells asks for less evidence, so it is another study; as are all of them
    filtered = replace(part, grid=replace(part.grid, whole=None))
    assert multiplicity(filtered, fast) == 2 and filtered.grid.digest == part.grid.digest
    every = replace(whole, grid=whole.grid.pick([each.cell.id for each in whole.grid.cells]))
    assert len({study_digest(each, fast) for each in (whole, part, filtered, every)}) == 4
    with opened(tmp_path, fast, part) as run:
        worker = ScriptedWorker()
        assert (run.study.multiplicity, len(run.cells)) == (8, 1)
        sweep(run, worker)
        # the proof of its column is that of the whole, row ends of cells that were not picked included
        ends = {each.cell.kv_high for each in whole.grid.cells if each.cell.column == item.cell.column}
        assert set(_kv_lens(run.cells, whole.grid)[item.cell.column]) >= ends > {item.cell.kv_high}
        assert _kv_lens(run.cells, None)[item.cell.column] == (item.cell.kv_high,)
        assert len(run.repository.decisions(run.study)) == 1


def test_another_study_uses_the_same_proofs(tmp_path: Path) -> None:
    with opened(tmp_path, routes("fast")) as run:
        sweep(run, ScriptedWorker())
        first = run.study.id
    with opened(tmp_path, routes("fast", "other")) as run:
        worker = ScriptedWorker()
        sweep(run, worker)
        assert run.study.id != first
        assert {route for route, _ in worker.proved} == {"other"}


def test_other_facts_use_none(tmp_path: Path) -> None:
    with opened(tmp_path, routes("fast")) as run:
        sweep(run, ScriptedWorker(), trials=1)
    there = replace(target(), facts=Facts("cpu", {"name": "Another CPU"}, {"torch": "2"}))
    with opened(tmp_path, routes("fast"), there) as run:
        worker = ScriptedWorker()
        sweep(run, worker, trials=1)
        assert {route for route, _ in worker.proved} == {"torch-sdpa", "fast"}


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path, routes("fast")) as run:
        database = run.repository.database
        with (
            pytest.raises(StudyLockedError, match="in use by another run"),
            open_run(database, target(), routes("fast"), tuning=True),
        ):
            pass
        with open_run(database, target(), routes("fast"), tuning=False) as reader:
            assert len(reader.cells) == 4
            with pytest.raises(AssertionError):
                _ = reader.queue


def test_a_line_up() -> None:
    place = target()
    column = place.grid.columns[0]
    known = routes(
        "torch-splitkv",
        foreign=NamedRoute("foreign", needs=frozenset({Need.HOST_KV_LENS})),
        refuses=NamedRoute("refuses", refuses="only on Mondays"),
        raises=NamedRoute("raises", refuses="raise"),
    )
    found = line_up(column, known, place.engine, place.arch, FACTS)
    assert found.fallback is known["torch-sdpa"]
    assert found.stock == "torch-sdpa"
    assert [route.name for route in found.runners] == ["torch-sdpa", "torch-splitkv", "foreign"]
    assert [route.name for route in found.candidates] == ["torch-splitkv", "foreign"]
    assert found.deployable == {"torch-sdpa", "torch-splitkv", "foreign"}
    assert found.unsupported["refuses"].reason == "only on Mondays"
    assert "RuntimeError: boom" in found.unsupported["raises"].reason
    assert {verdict.status for verdict in found.unsupported.values()} == {Status.UNSUPPORTED}


def test_a_need_that_the_engine_does_not_offer_is_not_deployable() -> None:
    place = target()
    bare = replace(place.engine, offers=frozenset())
    known = routes(foreign=NamedRoute("foreign", needs=frozenset({Need.HOST_KV_LENS})))
    found = line_up(place.grid.columns[0], known, bare, place.arch, FACTS)
    assert found.deployable == {"torch-sdpa"}
    assert [route.name for route in found.candidates] == ["foreign"]  # measured, as advice


@dataclass(frozen=True)
class Unbuilt(NamedRoute):
    """Supports everything; its kernels are not here."""

    why: str = "its module is not built: run autotune prebuild"

    def available(self, column: Column, facts: Facts) -> str | None:
        if self.why == "raise":
            raise RuntimeError("boom")
        return self.why or None


def test_a_route_whose_kernels_are_not_here() -> None:
    place, column = target(), target().grid.columns[0]

    def line(**more: NamedRoute) -> Lineup:
        known = routes("fast", **more)
        return line_up(column, known, place.engine, place.arch, FACTS, probe=lambda _: True)

    found = line(away=Unbuilt("away"), here=Unbuilt("here", why=""), broken=Unbuilt("broken", why="raise"))
    assert [route.name for route in found.candidates] == ["fast", "here"]
    assert found.unsupported["away"].reason == Unbuilt.why
    assert "RuntimeError: boom" in found.unsupported["broken"].reason
    assert found.absent == {"away"}
    assert left_out([found, line()]) == {"away": f"away is left out in 1 of 2 columns: {Unbuilt.why}"}
    # whoever does not probe does not ask: what makes a study must not depend on what is installed
    known = routes("fast", away=Unbuilt("away"))
    assert "away" not in line_up(column, known, place.engine, place.arch, FACTS).unsupported


def test_a_candidate_that_is_not_here_is_unsupported_until_it_is(tmp_path: Path) -> None:
    away, here = (
        routes("fast", **{"torch-splitkv": Unbuilt("torch-splitkv", why=why)}) for why in ("no", "")
    )
    assert study_digest(target(), away) == study_digest(target(), here)
    assert multiplicity(target(), away) == multiplicity(target(), here) == 8
    with opened(tmp_path, away) as run:
        assert sweep(run, ScriptedWorker()).settled == 4
        assert {route for route, _ in run_proofs(run)} == {"torch-sdpa", "fast"}
    with opened(tmp_path, here) as run:  # built in the meantime: the same study goes on
        worker = ScriptedWorker()
        assert sweep(run, worker).now == 4
        assert {route for route, _ in worker.proved} == {"torch-splitkv"}
        before = run.judge.outcome(run.cells[0].cell)
    with opened(tmp_path, away) as run:  # read where it is not built: what is proven stays proven
        assert run.judge.outcome(run.cells[0].cell) == before
        assert sweep(run, ScriptedWorker()).now == 0


def run_proofs(run: OpenedRun) -> set[tuple[str, str]]:
    return {(proof.route, proof.result.check) for proof in run.repository.all_proofs(run.fingerprint)}


def test_a_fallback_that_is_not_here_leaves_cells_unproven_and_says_why(tmp_path: Path) -> None:
    sdpa = Unbuilt("torch-sdpa", Family.CONTEXT)
    with opened(tmp_path, {**routes("fast"), "torch-sdpa": cast(Route, sdpa)}) as run:
        worker = ScriptedWorker()
        assert sweep(run, worker).settled == 0
        assert worker.proved == []
        outcome = run.judge.outcome(run.cells[0].cell).decision
        assert outcome.reason is Reason.UNPROVEN
        assert outcome.detail == f"fallback torch-sdpa: {Unbuilt.why}"


def test_without_a_fallback_nothing_runs(tmp_path: Path) -> None:
    known = {name: route for name, route in routes("fast").items() if name != "torch-sdpa"}
    with opened(tmp_path, known) as run:
        worker = ScriptedWorker()
        assert sweep(run, worker).settled == 4
        assert worker.proved == []
        outcome = run.judge.outcome(run.cells[0].cell).decision
        assert outcome.reason is Reason.NO_SAFE_ROUTE
        assert "not installed" in outcome.detail


def test_the_queue_after_a_kill(tmp_path: Path) -> None:
    """A process may die before, between and after each of the steps that end a trial."""
    with opened(tmp_path, routes("fast")) as run:
        store, study, queue, cells = run.repository, run.study, run.queue, run.cells
        database = store.database
        queue.begin(cells[0])
        queue.finish(cells[0], FASTER)
        queue.begin(cells[1])
        store.save_decision(study, cells[1].cell, KEPT)  # dies here
        queue.begin(cells[2])
        store.save_decision(study, cells[2].cell, FASTER)
        store.finish_trial(study, cells[2].cell, TrialState.COMPLETE)  # and here
        queue.begin(cells[3])  # and here
        with database.translated():
            queue._study.enqueue_trial({"cell": cells[3].number})  # and between enqueue and ask
        again = TrialQueue(database, store, study)
        assert again.recover(cells, store.decisions(study)) == 4
        assert again.recover(cells, store.decisions(study)) == 0
        states = {cell_id: trial.state for cell_id, trial in store.trials(study).items()}
        assert [states[item.cell.id].value for item in cells] == ["complete"] * 3 + ["running"]
        trials = again._study.get_trials()
        done = {trial.params["cell"]: trial.value for trial in trials if trial.state.name == "COMPLETE"}
        assert done == {cells[0].number: 1.5, cells[1].number: 1.0, cells[2].number: 1.5}
        assert sorted(trial.state.name for trial in trials) == ["COMPLETE"] * 3 + ["FAIL"] * 2
        again.begin(cells[3])
        assert store.trials(study)[cells[3].cell.id].kills == 1
        again.abandon(cells[3], TrialState.INTERRUPTED)
        again.abandon(cells[3], TrialState.FAILED)  # nothing to end any more
        assert store.trials(study)[cells[3].cell.id].state is TrialState.INTERRUPTED


def test_a_trial_says_what_its_cell_is(tmp_path: Path) -> None:
    with opened(tmp_path, routes("fast")) as run:
        run.queue.begin(run.cells[0])
        run.queue.finish(run.cells[0], FASTER)
        (trial,) = run.queue._study.get_trials()
        column = run.cells[0].cell.column
        assert trial.user_attrs["batch_size"] == column.batch_size
        assert trial.user_attrs["heads"] == "8/1/128"
        assert trial.user_attrs["answer"] == "fast"
        assert trial.user_attrs["models"] == "llama-3.1-70b @ attn_tp 8"


def test_what_optuna_maximises() -> None:
    assert value_of(FASTER) == 1.5
    assert value_of(KEPT) == 1.0


@pytest.mark.parametrize(
    ("name", "engine", "wanted"),
    [
        ("NVIDIA H200", "sglang", "nvidia-h200.sglang.yaml"),
        ("NVIDIA GB200 NVL72 (rev. 2)", "vllm", "nvidia-gb200-nvl72-rev-2.vllm.yaml"),
    ],
)
def test_file_names(name: str, engine: str, wanted: str) -> None:
    assert file_name(Facts("cuda", {"name": name}, {}), engine) == wanted
    assert file_name(FACTS, engine) == f"cpu.{engine}.yaml"


def test_deadlines() -> None:
    assert not Deadline(None).passed
    assert Deadline(None).left == float("inf")
    later = Deadline(60.0)
    assert 59.0 < later.left <= 60.0
    assert not later.passed
    soon = Deadline(0.01)
    time.sleep(0.02)
    assert soon.passed
    assert soon.left == 0.0


def test_the_code_version_follows_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_version() == code_version.__wrapped__()
    package = tmp_path / "autotune"
    for part in version_module.PARTS:
        (package / part).mkdir(parents=True)
    for name in version_module.FILES:
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("")
    monkeypatch.setattr(version_module, "__file__", str(package / "tuner" / "code_version.py"))
    seen = {code_version.__wrapped__()}
    (package / "checks" / "new.py").write_text("")
    seen.add(code_version.__wrapped__())
    (package / "checks" / "new.py").write_text("1")
    seen.add(code_version.__wrapped__())
    (package / "tuner" / "selftest.py").write_text("1")
    seen.add(code_version.__wrapped__())
    assert len(seen) == 4
    (package / "report").mkdir()
    (package / "report" / "grid.py").write_text("1")  # proves nothing
    assert code_version.__wrapped__() in seen
