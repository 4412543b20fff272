"""Times cells again in fresh children: a sample of them to measure tau, and those whose claim is a near one.

A sample's cell gets 16 rounds (CUDA: 64) of every proven route, whatever they say. A near claim gets rounds
until its own test has an answer, at most 64 of all later processes together, from the first that its route
was in. Every chunk is committed before anything is concluded from it; a child that dies is handled as in a
race, its rounds stand, and the next child takes the next process number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from autotune.domain.decision import Reason
from autotune.domain.verdict import Status
from autotune.tuner.prover import seed_of
from autotune.tuner.sample import CELLS_A_CHILD, ROUNDS_OF, draw, due
from autotune.tuner.standing import AGREE_ROUNDS, most_left
from autotune.worker.base import Runs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from autotune.bench.record import Round
    from autotune.domain.cell import Cell
    from autotune.domain.decision import Decision
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.listener import Listener
    from autotune.tuner.racer import Racer
    from autotune.tuner.run import OpenedRun
    from autotune.tuner.standing import Evidence

# The sample measures how children differ, so it needs several (``CELLS_A_CHILD``). A near claim only needs a
# later process than its first: more of them share one.
AGREED_A_CHILD = {"cpu": 1, "cuda": 16}
# Decisions of cells that were not timed.
_UNTIMED = frozenset({Reason.NO_SAFE_ROUTE, Reason.TOO_LARGE, Reason.UNSUPPORTED})


class Renewed(Runs, Protocol):
    """A worker whose child can be replaced between two jobs."""

    def recycle(self) -> None:
        """See :meth:`autotune.worker.worker.Worker.recycle`."""


class Rechecker:
    """The second processes of one run. It uses the racer's worker, between races only.

    Args:
        decided: the study's stored decisions, by cell id.
        on: False times nothing again: a study without a tau stays so, and near claims stay open.
    """

    def __init__(
        self,
        run: OpenedRun,
        racer: Racer,
        timer: Renewed,
        listener: Listener,
        deadline: Deadline,
        decided: Mapping[str, Decision],
        *,
        on: bool = True,
    ) -> None:
        self._run = run
        self._racer = racer
        self._timer = timer
        self._listener = listener
        self._deadline = deadline
        self._timed = {
            item.cell.id: item.cell
            for item in run.cells
            if item.cell.id in decided and decided[item.cell.id].reason not in _UNTIMED
        }
        self._rounds = ROUNDS_OF[run.target.facts.device]
        self._tried: set[str] = set()
        self._stuck: set[str] = set()  # whose second process came to no round in this call
        self._in_child = 0
        self._on = on

    def told(self, cell: Cell, decision: Decision | None) -> None:
        """What came of a cell: one that was timed may be drawn."""
        if decision is not None and decision.reason not in _UNTIMED:
            self._timed[cell.id] = cell

    def sample(self, *, last: bool = False) -> None:
        """Re-time the cells of the sample that are due; does nothing, and asks nothing, where none is.

        Args:
            last: no more cells will be timed in this study.
        """
        count = due(len(self._timed), last=last)
        if not self._on or sum(self._run.rechecks.drawn().values()) >= count:
            return
        wanted = self._draw(count)
        for cell in self._begin(wanted, "to measure how far ratios shift between processes"):
            if self._deadline.passed:
                break
            self._tried.add(cell.id)
            self._retime(cell, self._raced, sampled=True)

    def agree(self, cells: Sequence[Cell], *, first_only: bool = False) -> bool:
        """Give the near claims among ``cells`` their second process; whether there were any, and time.

        Those that wait under the study's first objective, which decides the tables unless another is asked
        for, come before those that wait under another one only; ``first_only`` leaves the latter out.
        """
        if not self._on:
            return False
        first = self._run.judge.objectives.first
        waits = [(cell, self._run.waits(cell)) for cell in cells]
        wanted = [cell for cell, under in waits if under == first]
        if not first_only:
            wanted += [cell for cell, under in waits if under not in (None, first)]
        # what stopped it is still so: trying again in this call would only use up the cell's chances
        wanted = [cell for cell in wanted if cell.id not in self._stuck]
        for cell in self._begin(wanted, "whose claim is a near one"):
            if self._deadline.passed:
                return False
            before = self._run.rechecks.count(cell)
            self._retime(cell, lambda it: self._second(it, self._evidences(it)), sampled=False)
            if self._run.rechecks.count(cell) == before:
                self._stuck.add(cell.id)
        return bool(wanted)

    def _draw(self, count: int) -> list[Cell]:
        """Cells to re-time: drawn ones whose child ended early, then new ones until ``count`` are drawn."""
        trials = self._run.repository.trials(self._run.study)
        given_up = {key for key, trial in trials.items() if trial.given_up}
        known = self._run.rechecks.drawn()
        chosen = list(known)
        open_ones = [cell for cell, whole in known.items() if not whole]
        left = {key: cell for key, cell in self._timed.items() if key not in given_up}
        while len(chosen) < count:
            cell = draw(self._run.study.seed, chosen, list(left.values()))
            if cell is None:
                break
            if self._raced(cell):
                chosen.append(cell)
                open_ones.append(cell)
            else:
                del self._timed[cell.id], left[cell.id]
        return [cell for cell in open_ones if cell.id not in self._tried | given_up]

    def _raced(self, cell: Cell) -> tuple[str, ...]:
        """The fallbacks and the proven candidates that have rounds to be held against; () without any."""
        names: dict[str, None] = {}
        candidates: dict[str, None] = {}
        for evidence in self._evidences(cell):
            if evidence.fallback_verdict.status is not Status.SAFE:
                continue
            known = {name for each in evidence.rounds for name in each.order}
            proven = [each.name for each in evidence.candidates if each.verdict.status is Status.SAFE]
            safe = [name for name in proven if name in known]
            if evidence.fallback in known and safe:
                names[evidence.fallback] = None
                candidates |= dict.fromkeys(safe)
        return tuple(names | candidates)

    def _evidences(self, cell: Cell) -> list[Evidence]:
        return [judge.evidence(cell) for judge in self._run.judges]

    def _second(self, cell: Cell, evidences: Sequence[Evidence]) -> tuple[str, ...]:
        """Routes of a near claim under any engine; () while the first process still owes the cell rounds."""
        pairs = list(zip(self._run.judges, evidences, strict=True))
        if any(judge.wanted(cell, evidence) for judge, evidence in pairs):
            return ()
        names = (name for judge, evidence in pairs for name in judge.second(cell, evidence))
        return tuple(dict.fromkeys(names))

    def _begin(self, cells: Sequence[Cell], why: str) -> Sequence[Cell]:
        """The cells, announced and with a fresh child; none where there is no time."""
        if not cells or self._deadline.passed:
            return ()
        self._listener.rechecking(len(cells), why)
        self._renew()
        return cells

    def _renew(self) -> None:
        """No child that has timed a cell may time it again."""
        self._timer.recycle()
        self._in_child = 0

    def _retime(self, cell: Cell, wanted: Callable[[Cell], tuple[str, ...]], *, sampled: bool) -> None:
        """Rounds of one cell in the child as it is, or in the next if it has served its cells.

        Args:
            wanted: the routes, asked before each child: one that died in another cell is out.
        """
        rechecks, study, device = self._run.rechecks, self._run.study, self._run.target.facts.device
        while live := wanted(cell):
            if self._in_child >= (CELLS_A_CHILD if sampled else AGREED_A_CHILD)[device]:
                self._renew()
            self._in_child += 1
            process, before = rechecks.next_process(cell), rechecks.rounds(cell)
            ended = self._racer.time(
                cell,
                live,
                self._run.judge.routes,
                seed=seed_of(study.seed, cell.id, f"recheck {process}"),
                first=0,
                most=self._rounds
                if sampled
                else most_left(self._evidences(cell), live, before, AGREE_ROUNDS),
                keep=self._keep(cell, process, sampled=sampled),
            )
            if not ended.again:
                return
            self._in_child = 0  # the child is gone, and what it had served

    def _keep(
        self, cell: Cell, process: int, *, sampled: bool
    ) -> Callable[[list[Round], list[Any]], tuple[str, ...] | bool]:
        """Commits a chunk, then says whether the process goes on."""
        evidences = self._evidences(cell)
        seen = 0

        def keep(reported: list[Round], raw: list[Any]) -> tuple[str, ...] | bool:
            nonlocal seen
            self._run.rechecks.append(cell, process, seen, raw, sampled=sampled)
            seen += len(reported)
            if self._deadline.passed:
                return False
            if sampled:
                return seen < self._rounds
            again = self._run.rechecks.rounds(cell)
            return self._second(cell, [replace(each, again=again) for each in evidences]) or False

        return keep
