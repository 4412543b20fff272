"""The adaptive search, with a worker that follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import log, log1p
from pathlib import Path
from typing import Any, cast

import pytest

from autotune.bench.record import Round
from autotune.checks import registry
from autotune.domain.cell import Cell
from autotune.domain.decision import Reason
from autotune.domain.verdict import FailureKind, Status
from autotune.space.engine import load_engine
from autotune.space.grid import expand
from autotune.space.space import load_file
from autotune.tuner.adaptive import Adaptive
from autotune.tuner.cost import best_shares, predict, predict_proof, within
from autotune.tuner.crew import Crew
from autotune.tuner.deadline import Deadline
from autotune.tuner.forecast import expected_gain
from autotune.tuner.listener import Silent
from autotune.tuner.pace import KEPT, Pace
from autotune.tuner.publish import accusations, decide_all
from autotune.tuner.run import OpenedRun
from autotune.tuner.target import Target
from autotune.tuner.tuner import Progress, Tuner
from autotune.worker.base import Failed, Outcome
from autotune.worker.jobs import ProveJob, TimeJob
from autotune.worker.worker import Worker
from tests.console import TINY
from tests.tuner.scripted import FACTS, ScriptedWorker, failed, opened, routes, sweep

CHECKS = registry.CHECKS[0].name
FALLBACK = "torch-sdpa"
# deployable on the CPU by its own name; others are not built in, and so deployable as a third party's
FAST = routes("fast")


@dataclass
class Clock:
    """Seconds that only the script passes."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Machine(ScriptedWorker):
    """Times that depend on the cell; each job takes its time on the clock.

    Attributes:
        law: microseconds of a route in a cell.
    """

    law: Any = None
    clock: Clock = field(default_factory=Clock)
    proof_s: float = 0.1
    timing_s: float = 0.5
    cell: Cell | None = None
    settled: list[Cell] = field(default_factory=list)

    def run(self, job: ProveJob | TimeJob, **options: Any) -> Outcome:
        if isinstance(job, ProveJob):
            self.clock.now += self.proof_s
        else:
            self.clock.now += self.timing_s
            self.cell = Cell.from_dict(job.cell)
            self.settled.append(self.cell)
        return super().run(job, **options)

    def _round(self, index: int, live: tuple[str, ...]) -> Round:
        if self.law is not None:
            assert self.cell is not None
            self.times = {name: self.law(name, self.cell) for name in live}
        return super()._round(index, live)


def wide() -> Target:
    """24 cells in 12 columns."""
    space = replace(load_file(TINY), q_len=(1, 2, 4), batch_size=(1, 4, 16, 64), kv_len=(64, 128))
    return Target(expand(space, load_engine("generic")), FACTS, "cpu", "host_mmap", seed=7)


def adaptive(
    run: OpenedRun,
    worker: ScriptedWorker,
    scout: ScriptedWorker | None = None,
    *,
    deadline: Deadline | None = None,
    weights: dict[str, float] | None = None,
    trials: int | None = None,
    provers: int = 1,
) -> Progress:
    """One call."""
    deadline = deadline or Deadline(None)
    pace = Pace.resumed(run.queue.noted(KEPT))
    strategy = Adaptive(run, deadline, pace, provers, weights)
    one = cast(Worker, worker)
    looks = cast(Worker, scout or ScriptedWorker(times=worker.times))
    crew = (
        Crew([one] * provers)
        if provers == 1
        else Crew([cast(Worker, ScriptedWorker()) for _ in range(provers)])
    )
    return Tuner(run, crew, one, Silent(), deadline, trials, strategy, scout=looks, pace=pace).sweep()


@contextmanager
def started(
    folder: Path, place: Target | None = None, **options: Any
) -> Iterator[tuple[OpenedRun, Adaptive]]:
    """A strategy that has its work and has handed nothing out."""
    with opened(folder, FAST, place) as run:
        strategy = Adaptive(run, Deadline(None), Pace(), 1)
        strategy.start(run.cells, frozenset(), None)
        yield run, strategy


def test_all_cells_are_settled_where_the_budget_allows(tmp_path: Path) -> None:
    with opened(tmp_path, FAST) as run:
        progress = adaptive(run, ScriptedWorker(times={"fast": 5.0}))
        assert (progress.cells, progress.settled, progress.now) == (4, 4, 4)
        assert {cell.decision.route for cell in decide_all(run)} == {"fast"}
        assert adaptive(run, ScriptedWorker(times={"fast": 5.0})).now == 0
        assert sweep(run, ScriptedWorker(times={"fast": 5.0})).now == 0
        assert set(progress.phases) == {"proof", "timing", "search"}
        assert all(phase.predicted_s > 0 for phase in progress.phases.values())


def test_the_cell_with_the_most_gain_a_second_by_hand(tmp_path: Path) -> None:
    with started(tmp_path) as (run, strategy):
        by_kv = {(i.cell.column.batch_size, i.cell.kv_high): i for i in run.cells}
        seen = {(1, 64): 3.0, (1, 128): 1.5, (2, 64): 1.02, (2, 128): 1.4}
        for place, ratio in seen.items():
            strategy.hopes.looks[by_kv[place].number] = {FALLBACK: 10.0 * ratio, "fast": 10.0}
            strategy.hopes.read(by_kv[place])
        margin, sd = log1p(run.study.margin), run.study.margin

        def gain(place: tuple[int, int]) -> float:
            return expected_gain(log(seen[place]), sd * sd, margin)

        def seconds(place: tuple[int, int]) -> float:
            return predict(by_kv[place].cell, "cpu", 2)

        first, second = strategy.choices()
        column = by_kv[1, 64].cell.column
        # one batch's proof is shared by both of its rows
        proof = predict_proof(column, "cpu", 2)
        both = (gain((1, 64)) + gain((1, 128))) / (proof + seconds((1, 64)) + seconds((1, 128)))
        alone = gain((1, 64)) / (proof + seconds((1, 64)))
        assert first.item == by_kv[1, 64]
        assert first.score == pytest.approx(max(both, alone))
        assert second.item == by_kv[2, 128]
        assert second.score == pytest.approx(
            max(
                gain((2, 128)) / (predict_proof(by_kv[2, 64].cell.column, "cpu", 2) + seconds((2, 128))),
                second.score,
            )
        )
        assert first.winners == second.winners == frozenset({"fast"})
        assert not first.look and not second.look
        pick = strategy.take()
        assert pick is not None and pick.item == by_kv[1, 64]
        # a trial of Optuna's, by our sampler
        (trial,) = run.queue._study.get_trials()
        assert trial.params == {"cell": pick.item.number}
        assert trial.user_attrs["batch_size"] == 1
        assert type(run.queue._study.sampler).__name__ == "CellSampler"


def test_weights_decide_between_equal_cells(tmp_path: Path) -> None:
    with opened(tmp_path, FAST) as run:
        wanted = run.cells[-1].cell
        worker = ScriptedWorker(times={"fast": 5.0})
        adaptive(run, worker, weights={wanted.id: 1.0}, trials=1)
        assert set(run.repository.decisions(run.study)) == {wanted.id}


def test_what_shares_a_proof() -> None:
    assert best_shares([(3.0, 1.0), (2.0, 1.0), (0.125, 1.0)], 2.0) == (1.25, 2)
    assert best_shares([(3.0, 1.0), (2.0, 1.0)], 0.0) == (3.0, 1)
    assert best_shares([(0.0, 1.0)], 1.0) == (0.0, 1)


def test_how_far_a_budget_reaches() -> None:
    cells = [item.cell for item in wide().grid.cells]
    column = [cell for cell in cells if cell.column == cells[0].column]
    proof, timing = predict_proof(cells[0].column, "cpu"), [predict(cell, "cpu") for cell in column]
    assert within(column, "cpu", proof) == 0
    assert within(column, "cpu", proof + min(timing)) == 1
    assert within(column, "cpu", proof + sum(timing)) == 2
    assert within(cells, "cpu", 1e9) == len(cells)
    assert within(cells, "cpu", 1e9, {cells[0].id: 3.0}) == 1
    counts = [within(cells, "cpu", seconds) for seconds in (0.0, 5.0, 10.0, 20.0)]
    assert counts == sorted(counts) and counts[0] == 0


def test_no_cell_is_settled_or_looked_at_twice(tmp_path: Path) -> None:
    worker = Machine(law=lambda name, cell: 10.0 if name == FALLBACK else 4.0 + cell.column.batch_size / 2)
    looks = Machine(law=worker.law)
    with opened(tmp_path, FAST, wide()) as run:
        progress = adaptive(run, worker, looks)
        assert progress.settled == len(run.cells)
        assert len(looks.settled) == len(set(looks.settled))
        trials = run.queue._study.get_trials()
        complete = [trial.params["cell"] for trial in trials if trial.state.name == "COMPLETE"]
        assert sorted(complete) == [item.number for item in sorted(run.cells, key=lambda i: i.number)]
        pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
        assert len(pruned) == len(looks.settled) > 0
        assert all(set(trial.user_attrs["look"]["times"]) == {FALLBACK, "fast"} for trial in pruned)
        assert {trial.state.name for trial in trials} == {"COMPLETE", "PRUNED"}


def test_a_budget_goes_where_the_gain_is(tmp_path: Path) -> None:
    """The candidate wins at large batches only, which cheapest first would come to last."""

    def law(name: str, cell: Cell) -> float:
        return 10.0 if name == FALLBACK or cell.column.batch_size < 16 else 3.0

    won = {}
    for name in ("adaptive", "exhaustive"):
        clock = Clock()
        worker = Machine(law=law, clock=clock)
        deadline = Deadline(20.0, clock)
        with opened(tmp_path / name, FAST, wide()) as run:
            if name == "adaptive":
                adaptive(run, worker, Machine(law=law, clock=clock, timing_s=0.2), deadline=deadline)
            else:
                Tuner(
                    run, Crew([cast(Worker, worker)]), cast(Worker, worker), Silent(), deadline, None
                ).sweep()
            won[name] = [cell for cell in decide_all(run) if cell.decision.route is not None]
    assert len(won["adaptive"]) > 2 * len(won["exhaustive"])
    assert all(cell.cell.column.batch_size >= 16 for cell in won["adaptive"])


def test_a_resume_takes_what_an_uninterrupted_run_would_have_taken(tmp_path: Path) -> None:
    def law(name: str, cell: Cell) -> float:
        return 10.0 if name == FALLBACK else 14.0 - 2 * log(cell.column.batch_size) - cell.kv_high / 64

    def order(run: OpenedRun) -> list[tuple[str, int]]:
        trials = run.queue._study.get_trials()
        return [(trial.state.name, trial.params["cell"]) for trial in trials]

    with opened(tmp_path / "whole", FAST, wide()) as run:
        adaptive(run, Machine(law=law), Machine(law=law), trials=8)
        whole = order(run)
    for part in (3, 1, 4):
        with opened(tmp_path / "parts", FAST, wide()) as run:
            adaptive(run, Machine(law=law), Machine(law=law), trials=part)
            parts = order(run)
    assert parts == whole
    assert sum(state == "COMPLETE" for state, _ in whole) == 8


THREE = routes("fast", "other")


def test_only_the_likely_winner_is_proven(tmp_path: Path) -> None:
    worker = ScriptedWorker(times={"fast": 5.0, "other": 9.0})
    with opened(tmp_path, THREE) as run:
        adaptive(run, worker)
        assert {route for route, _ in worker.proved} == {FALLBACK, "fast"}
        for cell in decide_all(run):
            assert (cell.decision.route, cell.decision.reason) == ("fast", Reason.PROVEN_FASTER)
            verdict = run.book.verdict(THREE["other"], cell.cell.column, "cpu", cell.cell)
            assert verdict.status is Status.UNPROVEN
        # N counts every cell and candidate, whatever was proven
        assert run.study.multiplicity == 8
        assert {each for names in worker.timed for each in names} == {FALLBACK, "fast"}
        before = {item.cell.id: run.repository.rounds(run.study, item.cell) for item in run.cells}
        # an exhaustive run proves the rest, goes on with the same rounds, and has no new trials
        rest = ScriptedWorker(times={"fast": 5.0, "other": 2.0})
        trials = len(run.queue._study.get_trials())
        assert sweep(run, rest).now == 4
        assert {route for route, _ in rest.proved} == {"other"}
        assert {cell.decision.route for cell in decide_all(run)} == {"other"}
        for item in run.cells:
            assert (
                run.repository.rounds(run.study, item.cell)[: len(before[item.cell.id])]
                == before[item.cell.id]
            )
        assert len(run.queue._study.get_trials()) == trials
        assert adaptive(run, ScriptedWorker()).now == 0


def test_the_next_best_is_tried_where_the_winner_is_unsafe(tmp_path: Path) -> None:
    worker = ScriptedWorker({("fast", CHECKS): failed()}, times={"fast": 3.0, "other": 5.0})
    with opened(tmp_path, THREE) as run:
        assert adaptive(run, worker).settled == 4
        assert {cell.decision.route for cell in decide_all(run)} == {"other"}
        assert {item.route for item in accusations(run)} == {"fast"}


def test_a_cell_that_nothing_wins_says_what_is_unproven(tmp_path: Path) -> None:
    """Search rounds promised more than the test could claim: the truth is that the rest is not proven."""
    looks = ScriptedWorker(times={"fast": 5.0, "other": 6.0})
    worker = ScriptedWorker(times={"fast": 10.0, "other": 10.0})
    with opened(tmp_path, THREE) as run:
        adaptive(run, worker, looks, trials=1)
        (open_one,) = [item for item in run.cells if run.repository.rounds(run.study, item.cell)]
        outcome = run.judge.outcome(open_one.cell).decision
        assert (outcome.route, outcome.reason) == (None, Reason.UNPROVEN)
        assert outcome.detail == "other: budget"
        assert run.repository.decisions(run.study) == {}
        # with time left the other one is tried, and the answer is final
        assert adaptive(run, worker, looks).settled == 4
        assert {cell.decision.reason for cell in decide_all(run)} == {Reason.NOT_FASTER}


def test_a_death_in_a_look_accuses_nobody(tmp_path: Path) -> None:
    class Dying(ScriptedWorker):
        def _end(self) -> Outcome | None:
            return None

        def run(self, job: Any, **options: Any) -> Outcome:
            self.timed.append(job.routes)
            return Failed(FailureKind.ILLEGAL_ACCESS, "SIGSEGV", "fast: timing", steps=1)

    with opened(tmp_path, FAST) as run:
        dying = Dying()
        assert adaptive(run, ScriptedWorker(times={"fast": 5.0}), dying).settled == 4
        assert dying.timed
        assert accusations(run) == ()
        assert {trial.lost for trial in run.repository.trials(run.study).values()} == {0}
        assert {cell.decision.route for cell in decide_all(run)} == {"fast"}
        said = {look["said"] for look in run.queue.looks().values()}
        assert said == {"SIGSEGV (fast: timing)"}


def test_rounds_of_a_look_are_no_rounds_of_the_test(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Ending(ScriptedWorker):
        def run(self, job: Any, **options: Any) -> Outcome:
            raise Killed

    with opened(tmp_path, FAST) as run:
        with pytest.raises(Killed):  # the look is over, the proof begins
            adaptive(run, Ending(), ScriptedWorker(times={"fast": 5.0}))
        assert len(run.queue.looks()) == 1
        assert all(run.repository.rounds(run.study, item.cell) == [] for item in run.cells)
        assert [trial.state.value for trial in run.repository.trials(run.study).values()] == ["interrupted"]
        (pruned, failed_one) = run.queue._study.get_trials()
        assert (pruned.state.name, failed_one.state.name) == ("PRUNED", "FAIL")
        # killed in a look: its trial ends, the cell stays pending and counts no retry
        with pytest.raises(Killed):
            adaptive(run, ScriptedWorker(), Ending())


def test_a_kill_in_a_look_is_mended(tmp_path: Path) -> None:
    with started(tmp_path) as (run, strategy):
        pick = strategy.take()
        assert pick is not None and pick.look == (FALLBACK, "fast")
    with opened(tmp_path, FAST) as run:
        assert [trial.state.name for trial in run.queue._study.get_trials()] == ["FAIL"]
        assert run.repository.trials(run.study) == {}
        assert adaptive(run, ScriptedWorker(times={"fast": 5.0})).settled == 4
        assert {trial.retries for trial in run.repository.trials(run.study).values()} == {0}


def test_several_children_prove_the_next_columns_together(tmp_path: Path) -> None:
    with opened(tmp_path, FAST, wide()) as run:
        worker = ScriptedWorker(times={"fast": 5.0})
        adaptive(run, worker, provers=3, trials=1)
        proven = {proof.column.id for proof in run.repository.all_proofs(run.fingerprint)}
        assert 1 < len(proven) <= 6
        assert len(run.repository.decisions(run.study)) == 1


def test_two_takers_never_have_the_same_column(tmp_path: Path) -> None:
    with started(tmp_path, wide()) as (_, strategy):
        picks = [strategy.take() for _ in range(5)]
        columns = [pick.item.cell.column for pick in picks if pick is not None]
        assert len(set(columns)) == len(columns) == 5
        first = picks[0]
        assert first is not None
        strategy.give_back(first, None)
        # what one may not have, another may
        taken = strategy.take(lambda column: column != first.item.cell.column)
        again = strategy.take(lambda column: column == first.item.cell.column)
        assert taken is not None and taken.item.cell.column not in columns
        assert again is not None and again.item.cell.column == first.item.cell.column


def test_the_same_study_whatever_the_strategy(tmp_path: Path) -> None:
    with opened(tmp_path, FAST) as run:
        sweep(run, ScriptedWorker(times={"fast": 5.0}), trials=2)
        study = run.study.id
    with opened(tmp_path, FAST) as run:
        assert run.study.id == study
        assert run.study.resumed
        assert adaptive(run, ScriptedWorker(times={"fast": 5.0})).now == 2
        assert {cell.decision.route for cell in decide_all(run)} == {"fast"}


def test_pace() -> None:
    pace = Pace()
    assert pace.factor("proof") == 1.0
    pace.add("proof", 10.0, 30.0)
    assert pace.factor("proof") == pytest.approx(40 / 20)
    pace.add("proof", 30.0, 50.0)
    later = Pace.resumed(pace.to_dict())
    assert later.call == {}
    assert later.factor("proof") == pytest.approx(90 / 50)
    later.add("proof", 50.0, 10.0)
    assert later.to_dict() == {"proof": {"predicted_s": 90.0, "actual_s": 90.0}}
    assert later.factor("timing") == 1.0
