"""Which cell comes next: a strategy hands out pending cells, the tuner settles them and says what came of it.

Several takers may work for one strategy (one a device): each takes, settles and tells; none assumes that
the cell before its own was its own too. The caller serialises the calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autotune.domain.cell import Cell, Column
    from autotune.domain.decision import Decision
    from autotune.store.records import StudyCell
    from autotune.tuner.queue import TrialQueue
    from autotune.tuner.scout import Look


@dataclass(frozen=True, slots=True)
class Wanted:
    """A cell whose missing proofs are to be run.

    Attributes:
        candidates: routes that are proven beside the engines' fallbacks; None: all that stand for the column.
    """

    item: StudyCell
    candidates: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Pick:
    """A cell to settle now, or only to look at.

    Attributes:
        item: the cell.
        again: it had a decision and a trial, and a new check, version or strategy opened it: no new trial.
        prove: what is proven before the cell is timed, ``item`` first; () where an earlier pick had it run.
        look: routes to time in a few rounds that serve the search only, proven or not; the pick is then not
            settled. () settles it.
    """

    item: StudyCell
    again: bool = False
    prove: tuple[Wanted, ...] = ()
    look: tuple[str, ...] = ()


def anything(column: Column) -> bool:
    """Every column may be taken."""
    return True


class Strategy(Protocol):
    """The order of one call's work."""

    def settled(self, cell: Cell) -> bool:
        """Whether a cell's answer is final for this strategy, from stored rows."""

    def start(self, pending: Sequence[StudyCell], again: frozenset[str], trials: int | None) -> None:
        """The call's work.

        Args:
            pending: cells to settle, cheapest first.
            again: ids of those that have a decision and a complete trial.
            trials: hand out at most so many; None: no limit.
        """

    def take(self, free: Callable[[Column], bool] = anything) -> Pick | None:
        """The next cell, its trial begun unless it is ``again``; None: there is no more work for this taker.

        Args:
            free: whether the taker may have cells of a column, to settle or to prove: another taker is
                proving the rest.
        """

    def told(self, item: StudyCell, decision: Decision | None) -> None:
        """What came of a pick; None: the deadline or a missing proof left it open."""

    def looked(self, item: StudyCell, look: Look) -> None:
        """What a pick that only looks has found; ``told`` follows, without a decision."""

    def give_back(self, pick: Pick, decision: Decision | None) -> None:
        """Called instead of ``told`` by a taker that can do no more: what it was to prove may not be proven,
        and a cell without a decision comes again, to another taker."""


class Exhaustive:
    """Every pending cell once, cheapest first.

    Args:
        settles: whether more work could change no engine's answer in a cell.
        provers: children that prove at once. Several prove the next cells' columns together, two columns a
            child: with one, all would wait for the slowest twice, for its fallback and for its candidates.
            They also prove the other cells of those columns that are still to come, which would otherwise
            find them idle. A single one keeps to the queue, whose cheapest cells come first.
        takers: how many there are. Several share the columns that are left, so that none is without work
            while another proves them all.
    """

    def __init__(
        self, queue: TrialQueue, settles: Callable[[Cell], bool], provers: int, takers: int = 1
    ) -> None:
        self._queue = queue
        self._settles = settles
        self._provers = provers
        self._takers = takers
        self._coming: deque[StudyCell] = deque()
        self._again: frozenset[str] = frozenset()
        self._ahead: set[Cell] = set()

    def settled(self, cell: Cell) -> bool:
        """See :class:`Strategy`."""
        return self._settles(cell)

    def start(self, pending: Sequence[StudyCell], again: frozenset[str], trials: int | None) -> None:
        """See :class:`Strategy`."""
        self._coming = deque(pending if trials is None else pending[:trials])
        self._again = again
        self._ahead = set()

    def take(self, free: Callable[[Column], bool] = anything) -> Pick | None:
        """See :class:`Strategy`."""
        item = next((item for item in self._coming if free(item.cell.column)), None)
        if item is None:
            return None
        prove = () if item.cell in self._ahead else self._next_columns(item, free)
        self._coming.remove(item)
        self._ahead.update(each.cell for each in prove)
        again = item.cell.id in self._again
        if not again:
            self._queue.begin(item)
        return Pick(item, again, tuple(Wanted(each) for each in prove))

    def told(self, item: StudyCell, decision: Decision | None) -> None:
        """See :class:`Strategy`; the order does not depend on answers."""

    def looked(self, item: StudyCell, look: Look) -> None:
        """See :class:`Strategy`; none is asked for."""

    def give_back(self, pick: Pick, decision: Decision | None) -> None:
        """See :class:`Strategy`."""
        self._ahead.difference_update(each.item.cell for each in pick.prove)
        if decision is None:
            self._coming.appendleft(pick.item)

    def _next_columns(self, first: StudyCell, free: Callable[[Column], bool]) -> tuple[StudyCell, ...]:
        """``first``, and the cells that are to be proven with it."""
        if self._provers == 1:
            return (first,)
        coming = [item for item in self._coming if free(item.cell.column)]
        most = 2 * self._provers
        if self._takers > 1:
            open_ones = {item.cell.column for item in coming if item.cell not in self._ahead}
            most = min(most, -(-len(open_ones) // self._takers))
        columns: set[Column] = {first.cell.column}
        found = [first]
        for item in coming:
            column = item.cell.column
            if item is not first and (column in columns or len(columns) < most):
                columns.add(column)
                found.append(item)
        return tuple(found)
