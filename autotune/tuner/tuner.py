"""The sweep: each cell that the strategy hands out is proven, raced, decided and committed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.domain.verdict import Status
from autotune.store.errors import StoreError
from autotune.store.records import TrialState
from autotune.tuner.lanes import Lanes
from autotune.tuner.prover import Prover
from autotune.tuner.racer import Racer
from autotune.tuner.strategy import Exhaustive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.domain.cell import Cell, Column
    from autotune.domain.decision import Decision
    from autotune.store.records import StudyCell
    from autotune.tuner.crew import Crew
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.decide import Evidence
    from autotune.tuner.lanes import Lane, LaneAtWork
    from autotune.tuner.listener import Listener
    from autotune.tuner.run import OpenedRun
    from autotune.tuner.strategy import Pick, Strategy
    from autotune.worker.base import Runs


@dataclass(frozen=True)
class Progress:
    """What one call did.

    ``cells`` are in the study, ``settled`` of them have a final answer now, ``now`` were settled by this
    call. ``out_of_budget`` says whether the deadline ended it. ``devices`` worked at the same time, if there
    were several: what was measured has seen that.
    """

    cells: int
    settled: int
    now: int
    out_of_budget: bool
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Hands:
    """What settles cells on one device."""

    prover: Prover
    racer: Racer


class Tuner:
    """Works through the pending cells of an opened run, in the order of a strategy (all of them if None).

    Args:
        crew, timer: of the one device, where there is one.
        lanes: several devices; each has its own, and ``crew`` and ``timer`` are not used.
    """

    def __init__(
        self,
        run: OpenedRun,
        crew: Crew,
        timer: Runs,
        listener: Listener,
        deadline: Deadline,
        trials: int | None,
        strategy: Strategy | None = None,
        *,
        lanes: Sequence[Lane] = (),
    ) -> None:
        self._run = run
        self._judge = run.judge
        self._listener = listener
        self._deadline = deadline
        self._trials = trials
        self._hands = self._with(crew, timer)
        self._lanes = tuple(lanes)
        self._kv_lens = _kv_lens(run.cells)
        self._strategy = strategy or Exhaustive(
            run.queue, run.settled, len(crew.workers), max(1, len(self._lanes))
        )

    def _with(self, crew: Crew, timer: Runs) -> _Hands:
        run, deadline = self._run, self._deadline
        return _Hands(
            Prover(crew, run.target, run.book, self._listener, deadline),
            Racer(timer, run.target, run.repository, run.study, run.book, run.judges, deadline),
        )

    def sweep(self) -> Progress:
        """Settle pending cells until none is left or the budget is spent.

        Whatever ends it (Ctrl-C, a full disk, a kill), every row committed so far stands, and the next
        call goes on from there. A cell that lost its child too often while it was timed stays unproven.
        """
        strategy = self._strategy
        decided = self._run.repository.decisions(self._run.study)
        # rows may be complete and their decision missing: a kill came in between
        pending = [
            item for item in self._run.cells if item.cell.id not in decided or not strategy.settled(item.cell)
        ]
        before = len(self._run.cells) - len(pending)
        trials = self._run.repository.trials(self._run.study)
        given_up = {cell_id for cell_id, trial in trials.items() if trial.given_up}
        pending = [item for item in pending if item.cell.id not in given_up]
        settled = 0
        left = None if self._deadline.seconds is None else self._deadline.left
        self._listener.started(len(self._run.cells), before, left)
        try:
            strategy.start(pending, frozenset(decided), self._trials)
            if len(self._lanes) > 1:
                settled = self._in_lanes(strategy)
            else:
                while not self._deadline.passed and (pick := strategy.take()) is not None:
                    decision = self._settle(pick, self._hands)
                    settled += decision is not None
                    strategy.told(pick.item, decision)
            self._amend()
        finally:
            self._listener.finished()
        devices = tuple(lane.name for lane in self._lanes)
        return Progress(len(self._run.cells), before + settled, settled, self._deadline.passed, devices)

    def _in_lanes(self, strategy: Strategy) -> int:
        """Settle cells on several devices at once; how many."""
        run = self._run
        lanes = Lanes(self._lanes, run.target.device, self._deadline, self._listener.warned)
        hands = {lane.name: self._with(lane.crew, lane.timer) for lane in lanes.at_work}
        run.queue.note("devices", [lane.name for lane in self._lanes])

        def settle(lane: LaneAtWork, pick: Pick) -> Decision | None:
            return self._settle(pick, hands[lane.name], lane)

        return lanes.work(strategy, settle)

    def _prove(self, items: Sequence[StudyCell], prover: Prover) -> None:
        """Run what is missing of the proofs of these cells' columns, and each cell's own launch."""
        wanted: dict[Column, list[Cell]] = {}
        for item in items:
            wanted.setdefault(item.cell.column, []).append(item.cell)
        fallbacks, others = [], []
        for column, cells in wanted.items():
            lineups = [judge.lineup(column) for judge in self._run.judges]
            held = {lineup.fallback.name: lineup.fallback for lineup in lineups if lineup.fallback}
            fits = [cell for cell in cells if not self._judge.too_large(cell)]
            if held and fits:
                fallbacks += [(route, column, fits) for route in held.values()]
                runners = {route.name: route for lineup in lineups for route in lineup.runners}
                others += [(route, column, fits) for name, route in runners.items() if name not in held]
        # A candidate is worth proving only beside a fallback that holds.
        prover.prove(fallbacks, self._kv_lens)
        safe = {
            column
            for route, column, _ in fallbacks
            if self._run.book.verdict(route, column, self._run.target.device).status is Status.SAFE
        }
        prover.prove([task for task in others if task[1] in safe], self._kv_lens)

    def _settle(self, pick: Pick, hands: _Hands, lane: LaneAtWork | None = None) -> Decision | None:
        """The decision of a cell, stored; None if it stays open. Its trial covers its proof, so that a kill
        there is counted."""
        item = pick.item
        try:
            self._listener.cell_started(item.cell)
            if pick.prove:
                self._prove(pick.prove, hands.prover)
            if lane is not None:
                lane.proven()
                self._run.queue.on_device(item, lane.name)
            decision = self._decide(item.cell, hands.racer)
        except BaseException:
            # the first error is the one to report; a database that is gone cannot note this one either
            with contextlib.suppress(StoreError):
                self._run.queue.abandon(item, TrialState.INTERRUPTED)
            raise
        if decision is None:
            self._run.queue.abandon(item, TrialState.FAILED)
            return None
        if pick.again:
            self._run.queue.amend(item, decision)
        else:
            self._run.queue.finish(item, decision)
        self._listener.cell_done(item.cell, decision)
        return decision

    def _amend(self) -> None:
        """Bring decisions up to date: a route that died in one cell is unsafe in its whole column."""
        decided = self._run.repository.decisions(self._run.study)
        for item in self._run.cells:
            if (stored := decided.get(item.cell.id)) is not None:
                now = self._judge.outcome(item.cell).decision
                if now != stored:
                    self._run.queue.amend(item, now)

    def _decide(self, cell: Cell, racer: Racer) -> Decision | None:
        """The cell's final decision, or None if the deadline or a missing proof left it open."""
        died: str | None = ""
        while died is not None:  # a dead route is unsafe now, the others race on
            evidences = [judge.evidence(cell) for judge in self._run.judges]
            if any(_waits(evidence) for evidence in evidences):
                return None
            raced, died = racer.race(cell, evidences, self._judge.routes)
        self._run.save_timings(cell, raced)
        # read once more: a route that died in the race has another verdict now
        judged = [(judge, judge.evidence(cell)) for judge in self._run.judges]
        if not all(judge.settled(cell, evidence) for judge, evidence in judged):
            return None
        return self._judge.outcome(cell, judged[0][1]).decision


def _waits(evidence: Evidence) -> bool:
    """Whether an engine's fallback is still to be proven: rounds without it would be missing for good, since
    only common rounds compare two routes and a cell has a fixed number of them."""
    return evidence.fallback_verdict.status is Status.UNPROVEN and not evidence.too_large


def _kv_lens(cells: tuple[StudyCell, ...]) -> dict[Column, tuple[int, ...]]:
    """Lengths over which a column's checks spread theirs: its rows' ends, up to max_context."""
    ends: dict[Column, set[int]] = {}
    for item in cells:
        ends.setdefault(item.cell.column, {item.cell.column.max_context}).add(item.cell.kv_high)
    return {column: tuple(sorted(found)) for column, found in ends.items()}
