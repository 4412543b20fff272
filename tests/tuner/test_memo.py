"""A kept answer is the answer: every part of its key, and what asking again costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from autotune.bench.objective import Objective
from autotune.bench.record import Round
from autotune.domain.cell import Cell
from autotune.domain.decision import Reason
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.store.repository import Repository
from autotune.tuner import judge as judging
from autotune.tuner.book import TIMING, TIMING_VERSION
from autotune.tuner.crew import Crew
from autotune.tuner.deadline import Deadline
from autotune.tuner.decide import Answer, answer
from autotune.tuner.listener import Silent
from autotune.tuner.publish import decide_all
from autotune.tuner.run import OpenedRun
from autotune.tuner.sample import ROUNDS
from autotune.tuner.standing import Evidence, Question
from autotune.tuner.target import Target
from autotune.tuner.tuner import Tuner
from autotune.worker.base import Broken, Outcome
from autotune.worker.worker import Worker
from tests.console import SIX
from tests.tuner.scripted import ScriptedWorker, opened, routes, sweep, target

FAST = routes("fast")
TIMES = {"fast": 9.0, "torch-sdpa": 10.0}


def declaring(*names: str, space: Path = SIX) -> Target:
    """Six cells, each asked under these objectives."""
    place = target(space=space)
    return replace(place, grid=replace(place.grid, space=replace(place.grid.space, objectives=names)))


@dataclass
class Computed:
    """The objectives under which answers were computed, in turn."""

    seen: list[Objective] = field(default_factory=list)

    def since(self) -> int:
        count = len(self.seen)
        self.seen.clear()
        return count


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    found = Computed()

    def counted(evidence: Evidence, test: Any, question: Question) -> Answer:
        found.seen.append(question.objective)
        return answer(evidence, test, question)

    monkeypatch.setattr(judging, "answer", counted)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OpenedRun]:
    with opened(tmp_path, FAST, declaring("graph", "step")) as run:
        sweep(run, ScriptedWorker(times=TIMES))
        yield run


def fresh(run: OpenedRun, cell: Cell) -> None:
    """What is kept is what the rows say now, under every objective and for what is asked about it."""
    judge = run.judge
    evidence = judge.evidence(cell)
    for name in judge.objectives.names:
        assert judge.known(cell, name).decision == judge.outcome(cell, evidence, objective=name).decision
    assert judge.settled(cell) == judge.settled(cell, evidence)
    second = judge.second(cell, evidence)
    assert (run.waits(cell) is not None) == bool(second and not judge.wanted(cell, evidence))


def rounds(first: int, count: int, **times: float) -> list[dict[str, Any]]:
    live = tuple(times)
    ones = dict.fromkeys(live, 1.0)
    return [
        Round(i, live, times, times, ones, dict.fromkeys(live, 1)).to_dict()
        for i in range(first, first + count)
    ]


def test_asking_again_computes_nothing(run: OpenedRun, computed: Computed) -> None:
    run.learn()
    computed.since()
    for item in run.cells:
        assert run.settled(item.cell) and run.waits(item.cell) is None
    decide_all(run)
    decide_all(run, "step")
    assert sweep(run, ScriptedWorker()).now == 0
    assert computed.since() == 0


def test_a_new_round(run: OpenedRun, computed: Computed) -> None:
    cell = run.cells[0].cell
    before = run.judge.known(cell)
    stored = run.repository.round_count(run.study, cell)
    computed.since()
    run.repository.append_rounds(
        run.study, cell, stored, rounds(stored, 60, **{"torch-sdpa": 10.0, "fast": 1})
    )
    after = run.judge.known(cell)
    assert computed.since() == 2
    assert after.decision.speedup is not None and before.decision.speedup is not None
    assert after.decision.speedup > before.decision.speedup
    fresh(run, cell)


def test_rounds_that_another_process_appends_are_kept_under_their_number(
    run: OpenedRun, computed: Computed
) -> None:
    """They are seen once the cell is read again; an answer with them is not taken for one without."""
    cell = run.cells[0].cell
    run.judge.known(cell)
    other = Repository(run.repository.database)
    stored = other.round_count(run.study, cell)
    other.append_rounds(run.study, cell, stored, rounds(stored, 60, **{"torch-sdpa": 10.0, "fast": 1.0}))
    run.repository.rounds(run.study, cell)
    computed.since()
    assert run.judge.known(cell).decision.speedup == run.judge.outcome(cell).decision.speedup
    assert computed.since() == 2
    fresh(run, cell)


def test_a_proof_that_turns_unsafe(run: OpenedRun) -> None:
    cell = run.cells[0].cell
    other = next(item.cell for item in run.cells if item.cell.column != cell.column)
    assert run.judge.known(cell).decision.reason is Reason.PROVEN_FASTER
    fault = CheckResult(
        TIMING, TIMING_VERSION, CheckStatus.FAILED, 1, kind=FailureKind.ILLEGAL_ACCESS, detail="SIGSEGV"
    )
    sibling = next(item.cell for item in run.cells if item.cell.column == cell.column and item.cell != cell)
    run.book.save(sibling, FAST["fast"], fault, "")  # in another cell of the column
    assert run.judge.known(cell).decision.reason is Reason.CANDIDATE_UNSAFE
    assert run.judge.known(other).decision.reason is Reason.PROVEN_FASTER
    fresh(run, cell)


def test_a_fault_that_another_process_finds(run: OpenedRun, computed: Computed) -> None:
    """It is taken up before a table is written."""
    cell = run.cells[0].cell
    assert run.judge.known(cell).decision.reason is Reason.PROVEN_FASTER
    fault = CheckResult(
        TIMING, TIMING_VERSION, CheckStatus.FAILED, 1, kind=FailureKind.ILLEGAL_ACCESS, detail="SIGSEGV"
    )
    other = Repository(run.repository.database)
    other.save_proof(run.fingerprint, cell, "fast", 1, fault, repro="")
    run.book.renew()
    assert run.judge.known(cell).decision.reason is Reason.CANDIDATE_UNSAFE
    fresh(run, cell)
    run.learn()
    computed.since()
    run.book.renew()  # nothing new
    run.learn()
    assert computed.since() == 0


def test_why_timing_ended(tmp_path: Path, computed: Computed) -> None:
    def unresolved(index: int) -> float:
        return 9.0 if index % 2 else 11.0

    class Cut(ScriptedWorker):
        def _round(self, index: int, live: tuple[str, ...]) -> Round:
            self.times["fast"] = unresolved(index)
            return super()._round(index, live)

        def _end(self) -> Outcome | None:
            return Broken(UnprovenReason.OUT_OF_MEMORY, "no memory", "")

    with opened(tmp_path, FAST, declaring("graph")) as run:
        sweep(run, Cut(times={"torch-sdpa": 10.0}), trials=1)
        cell = run.cells[0].cell
        assert run.judge.known(cell).decision.detail.endswith(": no memory")
        computed.since()
        told = run.book._rows[cell.column.id, "torch-sdpa", 1][cell.id, TIMING]
        run.book.save(cell, FAST["torch-sdpa"], replace(told, detail="no memory again"), "")
        assert run.judge.known(cell).decision.detail.endswith(": no memory again")
        assert computed.since() == 1
        fresh(run, cell)


def test_a_round_of_a_second_process(run: OpenedRun, computed: Computed) -> None:
    cell = run.cells[0].cell
    run.judge.known(cell)
    process, tau = run.rechecks.next_process(cell), run.judge.tau()
    computed.since()
    run.rechecks.append(cell, process, 0, rounds(0, 4, **TIMES), sampled=False)
    assert run.judge.tau() == tau
    run.judge.known(cell)
    assert computed.since() == 2
    fresh(run, cell)


def test_tau(tmp_path: Path) -> None:
    """What other cells say moves the margin of one whose own rows stay as they were."""
    worker = cast(Worker, ScriptedWorker(times=TIMES))
    with opened(tmp_path, FAST, declaring("graph", "step")) as run:
        Tuner(run, Crew([worker]), worker, Silent(), Deadline(None), None, again=False).sweep()
        cell, *others = [item.cell for item in run.cells]
        assert run.judge.tau() is None
        assert run.judge.known(cell).decision.reason is Reason.PROVEN_FASTER
        shifted = rounds(0, ROUNDS, **{"torch-sdpa": 10.0, "fast": 9.0 * 1.2})
        for other in others:
            run.rechecks.append(other, 1, 0, shifted, sampled=True)
        assert run.judge.tau() is not None
        assert run.judge.known(cell).decision.reason is Reason.NOT_FASTER
        fresh(run, cell)


def test_another_weight_asks_the_weighed_objective_again_and_no_other(
    run: OpenedRun, computed: Computed
) -> None:
    cell = run.cells[0].cell
    run.judge.known(cell)
    models = run.judge.known(cell, "step").decision
    computed.since()
    run.weigh(1, 1.0)
    run.judge.known(cell, "graph")
    assert computed.since() == 0
    run.judge.known(cell, "step")
    assert computed.since() == 1
    fresh(run, cell)
    run.weigh(None, 0.0)
    assert run.judge.known(cell, "step").decision == models


def test_another_margin(run: OpenedRun) -> None:
    cell = run.cells[0].cell
    assert run.judge.known(cell).decision.route == "fast"
    run.judge.test = replace(run.judge.test, margin=0.5)
    assert run.judge.known(cell).decision.route is None
    fresh(run, cell)


def test_rounds_are_decoded_once_for_all_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, FAST, declaring("graph", "step")) as run:
        sweep(run, ScriptedWorker(times=TIMES))
    with opened(tmp_path, FAST, declaring("graph", "step")) as run:
        judge = run.judge
        twin = judging.Judge(
            judge.target,
            judge.routes,
            run.repository,
            run.study,
            run.book,
            judge.test,
            run.rechecks,
            judge._rounds,
        )
        run.others = (twin,)
        for each in run.judges:  # reads the sample's cells
            assert None not in [each.tau(name) for name in ("graph", "step")]
        real, read = run.repository.rounds, []

        def counted(study: Any, cell: Cell) -> list[dict[str, Any]]:
            read.append(cell.id)
            return real(study, cell)

        monkeypatch.setattr(run.repository, "rounds", counted)
        run.learn()
        for each in run.judges:
            decide_all(run.under(each))
        # the cell that tau read last is still held
        assert len(run.cells) - 1 <= len(read) == len(set(read)) <= len(run.cells)
