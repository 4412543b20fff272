"""The sweep: each cell that the strategy hands out is proven, raced, decided and committed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.domain.verdict import Status
from autotune.store.errors import StoreError
from autotune.store.records import TrialState
from autotune.tuner.cost import predict, predict_look, predict_proof
from autotune.tuner.lanes import Lanes
from autotune.tuner.pace import KEPT, PROOF, SEARCH, TIMING, Pace, Phase
from autotune.tuner.prover import Prover
from autotune.tuner.racer import Racer
from autotune.tuner.recheck import Rechecker
from autotune.tuner.scout import Scout, look_settings
from autotune.tuner.strategy import Exhaustive, Pick
from autotune.tuner.tally import Tally

if TYPE_CHECKING:
    from autotune.domain.cell import Cell, Column
    from autotune.domain.decision import Decision
    from autotune.routes.base import Route
    from autotune.space.grid import Grid
    from autotune.store.records import StudyCell
    from autotune.tuner.crew import Crew
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.lanes import Lane, LaneAtWork
    from autotune.tuner.listener import Listener
    from autotune.tuner.recheck import Renewed
    from autotune.tuner.run import OpenedRun
    from autotune.tuner.standing import Evidence
    from autotune.tuner.strategy import Strategy, Wanted
    from autotune.worker.base import Runs

# A second process that refuses, or in which a route dies, may bring back one that had left early, and that
# one's claim may be a near one too. What is open after so many passes is left to the next call.
SECOND_PASSES = 3


@dataclass(frozen=True)
class Progress:
    """What one call did.

    ``cells`` are in the study, ``settled`` of them have a final answer now (see :class:`Tally`), ``now`` of
    these had none when the call began. ``out_of_budget`` says whether the deadline ended it. ``devices``
    worked at the same time, if there were several: what was measured has seen that. ``phases`` are predicted
    and measured seconds. ``waiting`` are cells that only wait for a second process, by objective.
    ``reopened`` had a final answer when the call began, and have none now: tau has moved, or a check is new.
    """

    cells: int
    settled: int
    now: int
    out_of_budget: bool
    devices: tuple[str, ...] = ()
    phases: Mapping[str, Phase] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    reopened: int = 0


@dataclass(frozen=True)
class _Hands:
    """What settles cells on one device."""

    prover: Prover
    racer: Racer
    scout: Scout | None


class Tuner:
    """Works through the pending cells of an opened run.

    Args:
        crew, timer: of the one device, where there is one.
        strategy: what comes next; None: every pending cell, cheapest first.
        lanes: several devices; each has its own, and ``crew``, ``timer`` and ``scout`` are not used.
        scout: times what a strategy wants to look at; one that times nothing else. None: it wants nothing.
        pace: where predicted and measured seconds are counted.
        again: time cells again in second processes, for tau and near claims.
    """

    def __init__(
        self,
        run: OpenedRun,
        crew: Crew,
        timer: Renewed,
        listener: Listener,
        deadline: Deadline,
        trials: int | None,
        strategy: Strategy | None = None,
        *,
        lanes: Sequence[Lane] = (),
        scout: Runs | None = None,
        pace: Pace | None = None,
        again: bool = True,
    ) -> None:
        self._run = run
        self._judge = run.judge
        self._listener = listener
        self._deadline = deadline
        self._trials = trials
        self._hands = self._with(crew, timer, scout)
        self._timer = timer
        self._again = again
        self._lanes = tuple(lanes)
        self._kv_lens = _kv_lens(run.cells, run.target.grid.whole)
        self._pace = pace or Pace()
        self._strategy = strategy or Exhaustive(
            run.queue, run.settled, len(crew.workers), max(1, len(self._lanes))
        )

    def _with(self, crew: Crew, timer: Runs, scout: Runs | None) -> _Hands:
        run, deadline = self._run, self._deadline
        return _Hands(
            Prover(crew, run.target, run.book, self._listener, deadline),
            Racer(timer, run.target, run.repository, run.study, run.book, run.judges, deadline),
            None if scout is None else Scout(scout, run.target, run.study.seed),
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
        before = Tally.of(self._run, decided, strategy.settled)
        trials = self._run.repository.trials(self._run.study)
        given_up = {cell_id for cell_id, trial in trials.items() if trial.given_up}
        pending = [item for item in pending if item.cell.id not in given_up]
        # cells that only another objective has opened again come after all that change a table
        pending.sort(key=lambda item: item.cell.id in decided and self._run.answers_first(item.cell))
        left = None if self._deadline.seconds is None else self._deadline.left
        self._listener.started(len(self._run.cells), len(before.settled), left)
        try:
            strategy.start(pending, frozenset(decided), self._trials)
            if len(self._lanes) > 1:
                hands, timer = self._in_lanes(strategy)
                recheck = self._rechecker(hands.racer, timer)
            else:
                hands, recheck = self._hands, self._rechecker(self._hands.racer, self._timer)
                recheck.sample()
                self._agree_first(recheck, decided, given_up)
                taus = self._taus()
                while not self._deadline.passed and (pick := strategy.take()) is not None:
                    decision = self._settle(pick, hands)
                    strategy.told(pick.item, decision)
                    recheck.told(pick.item.cell, decision)
                    recheck.sample()
                    if (now := self._taus()) != taus:
                        taus = now
                        # at once: a search has its best cells behind it, and a budget may not reach the end
                        self._time_on(hands, lambda cell: not self._run.answers_first(cell))
            recheck.sample(last=self._trials is None or len(pending) <= self._trials)
            self._second(recheck, hands)
            self._amend()
            after = Tally.of(
                self._run, self._run.repository.decisions(self._run.study), self._strategy.settled
            )
            self._run.queue.note(KEPT, self._pace.to_dict())
        finally:
            self._listener.finished()
        return Progress(
            len(self._run.cells),
            len(after.settled),
            len(after.settled - before.settled),
            self._deadline.passed,
            tuple(lane.name for lane in self._lanes),
            self._pace.call,
            after.by_objective,
            len(before.settled - after.settled),
        )

    def _rechecker(self, racer: Racer, timer: Renewed) -> Rechecker:
        decided = self._run.repository.decisions(self._run.study)
        return Rechecker(self._run, racer, timer, self._listener, self._deadline, decided, on=self._again)

    def _agree_first(self, recheck: Rechecker, decided: Container[str], given_up: Container[str]) -> None:
        """What an earlier call left waiting for a second process, which is all that its letter lacks: some
        rounds each, while one new cell can cost as much as a dozen of them."""
        if self._measured:
            cells = [item.cell for item in self._run.cells]
            known = [cell for cell in cells if cell.id in decided and cell.id not in given_up]
            recheck.agree(known, first_only=True)

    def _second(self, recheck: Rechecker, hands: _Hands) -> None:
        """Once tau is known: time on what it has opened again, and give near claims their second process."""
        if not self._measured:
            return
        for _ in range(SECOND_PASSES):
            cells = self._time_on(hands)
            if self._deadline.passed or not recheck.agree(cells):
                return

    @property
    def _measured(self) -> bool:
        """Whether tau is known, for any engine under any objective."""
        return any(judge.measured for judge in self._run.judges)

    def _taus(self) -> list[float | None]:
        return [judge.tau(name) for judge in self._run.judges for name in judge.objectives.names]

    def _time_on(self, hands: _Hands, wanted: Callable[[Cell], bool] = lambda _: True) -> list[Cell]:
        """Settle again what is wanted and open of the cells that have a decision; all these cells."""
        decided = self._run.repository.decisions(self._run.study)
        trials = self._run.repository.trials(self._run.study)
        given_up = {key for key, trial in trials.items() if trial.given_up}
        items = [it for it in self._run.cells if it.cell.id in decided and it.cell.id not in given_up]
        for item in items:
            if not self._deadline.passed and wanted(item.cell) and not self._strategy.settled(item.cell):
                self._settle(Pick(item, again=True), hands, told=True)
        return [item.cell for item in items]

    def _in_lanes(self, strategy: Strategy) -> tuple[_Hands, Renewed]:
        """Settle cells on several devices at once: the hands and timer of one that is left."""
        run = self._run
        lanes = Lanes(self._lanes, run.target.device, self._deadline, self._listener.warned)
        hands = {lane.name: self._with(lane.crew, lane.timer, lane.scout) for lane in lanes.at_work}
        run.queue.note("devices", [lane.name for lane in self._lanes])

        def settle(lane: LaneAtWork, pick: Pick) -> Decision | None:
            return self._settle(pick, hands[lane.name], lane)

        lanes.work(strategy, settle)
        left = lanes.left
        return self._with(left.crew, left.timer, left.scout), left.timer

    def _look(self, pick: Pick, scout: Scout | None) -> None:
        """Search rounds of a cell, kept with its trial."""
        cell = pick.item.cell
        assert scout is not None, "a strategy that looks needs a scout"
        judge, device = self._judge, self._run.target.facts.device
        objective = judge.objectives.of(cell.column)[judge.objectives.first]
        began = self._deadline.now()
        with self._trial_of(pick.item):
            found = scout.look(cell, pick.look, objective)
            self._run.queue.looked(pick.item, found.to_dict())
        predicted = predict_look(cell, device, look_settings(device), len(pick.look))
        self._pace.add(SEARCH, predicted, self._deadline.now() - began)
        self._strategy.looked(pick.item, found)

    def _prove(self, wanted: Sequence[Wanted], prover: Prover) -> None:
        """Run what is missing of the proofs of these cells' columns, and each cell's own launch."""
        columns: dict[Column, list[Wanted]] = {}
        for each in wanted:
            columns.setdefault(each.item.cell.column, []).append(each)
        fallbacks: list[tuple[Route, Column, list[Cell]]] = []
        others: list[tuple[Route, Column, list[Cell]]] = []
        for column, each_wanted in columns.items():
            lineups = [judge.lineup(column) for judge in self._run.judges]
            held = {lineup.fallback.name: lineup.fallback for lineup in lineups if lineup.fallback}
            fits = [each for each in each_wanted if not self._judge.too_large(each.item.cell)]
            if held and fits:
                fallbacks += [(route, column, [each.item.cell for each in fits]) for route in held.values()]
                runners = {route.name: route for lineup in lineups for route in lineup.runners}
                for name, route in runners.items():
                    takes = [e.item.cell for e in fits if e.candidates is None or name in e.candidates]
                    if name not in held and takes:
                        others.append((route, column, takes))
        # A candidate is worth proving only beside a fallback that holds.
        self._run_proofs(fallbacks, prover)
        safe = {
            column
            for route, column, _ in fallbacks
            if self._run.book.verdict(route, column, self._run.target.device).status is Status.SAFE
        }
        self._run_proofs([task for task in others if task[1] in safe], prover)

    def _run_proofs(self, tasks: Sequence[tuple[Route, Column, Sequence[Cell]]], prover: Prover) -> None:
        book, device = self._run.book, self._run.target.device
        predicted = sum(
            book.owed(route, column, cells, device) * predict_proof(column, device, 1)
            for route, column, cells in tasks
        )
        began = self._deadline.now()
        prover.prove(tasks, self._kv_lens)
        if predicted:
            self._pace.add(PROOF, predicted, self._deadline.now() - began)

    @contextlib.contextmanager
    def _trial_of(self, item: StudyCell) -> Iterator[None]:
        """Ends the cell's trial as interrupted if an error ends the work on it."""
        try:
            yield
        except BaseException:
            # the first error is the one to report; a database that is gone cannot note this one either
            with contextlib.suppress(StoreError):
                self._run.queue.abandon(item, TrialState.INTERRUPTED)
            raise

    def _settle(
        self, pick: Pick, hands: _Hands, lane: LaneAtWork | None = None, *, told: bool = False
    ) -> Decision | None:
        """The decision of a cell, stored; None if it stays open, as after a look. Its trial covers its proof,
        so that a kill there is counted.

        Args:
            told: whoever watches has been told of the cell's decision, and counts it.
        """
        item = pick.item
        if pick.look:
            self._look(pick, hands.scout)
            return None
        with self._trial_of(item):
            if not told:
                self._listener.cell_started(item.cell)
            if pick.prove:
                self._prove(pick.prove, hands.prover)
            if lane is not None:
                lane.proven()
                self._run.queue.on_device(item, lane.name)
            decision = self._decide(item.cell, hands.racer)
        if decision is None:
            self._run.queue.abandon(item, TrialState.FAILED)
            self._listener.cell_left(item.cell)
            return None
        if pick.again:
            self._run.queue.amend(item, decision)
        else:
            self._run.queue.finish(item, decision)
        (self._listener.cell_again if told else self._listener.cell_done)(item.cell, decision)
        return decision

    def _amend(self) -> None:
        """Bring decisions up to date: a route that died in one cell is unsafe in its whole column, and tau
        moves every cell's margin."""
        run = self._run
        decided = run.repository.decisions(run.study)
        for item in run.cells:
            if (stored := decided.get(item.cell.id)) is not None:
                now = self._judge.known(item.cell).decision
                if now != stored:
                    run.queue.amend(item, now)

    def _decide(self, cell: Cell, racer: Racer) -> Decision | None:
        """The cell's final decision, or None if the deadline or a missing proof left it open."""
        died: str | None = ""
        while died is not None:  # a dead route is unsafe now, the others race on
            evidences = [judge.evidence(cell) for judge in self._run.judges]
            if any(_waits(evidence) for evidence in evidences):
                return None
            raced, died = self._race(cell, evidences, racer)
        self._run.save_timings(cell, raced)
        # read once more: a route that died in the race has another verdict now
        return self._judge.known(cell).decision if self._strategy.settled(cell) else None

    def _race(self, cell: Cell, evidences: Sequence[Evidence], racer: Racer) -> tuple[Evidence, str | None]:
        began = self._deadline.now()
        raced, died = racer.race(cell, evidences, self._judge.routes)
        if new := raced.rounds[len(evidences[0].rounds) :]:
            predicted = predict(cell, self._run.target.facts.device, len(new[0].order))
            self._pace.add(TIMING, predicted, self._deadline.now() - began)
        return raced, died


def _waits(evidence: Evidence) -> bool:
    """Whether an engine's fallback is still to be proven: rounds without it would be missing for good, since
    only common rounds compare two routes and a cell has a fixed number of them."""
    return evidence.fallback_verdict.status is Status.UNPROVEN and not evidence.too_large


def _kv_lens(cells: tuple[StudyCell, ...], whole: Grid | None) -> dict[Column, tuple[int, ...]]:
    """Lengths over which a column's checks spread theirs: its rows' ends, up to max_context.

    Args:
        whole: where the cells are picked ones, the grid of all rows: a proof is the same there and here.
    """
    ends: dict[Column, set[int]] = {}
    for item in cells:
        ends.setdefault(item.cell.column, {item.cell.column.max_context}).add(item.cell.kv_high)
    for each in whole.cells if whole is not None else ():
        if each.cell.column in ends:
            ends[each.cell.column].add(each.cell.kv_high)
    return {column: tuple(sorted(found)) for column, found in ends.items()}
