"""What the tuner tells whoever watches it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from autotune.domain.cell import Cell, Column
    from autotune.domain.decision import Decision
    from autotune.domain.verdict import CheckResult, Verdict
    from autotune.tuner.pilot import Pilot


class Listener(Protocol):
    """Progress events, in order; none may raise, none may take long."""

    def pilot_done(self, pilot: Pilot) -> None:
        """A new study's pilot was run: it has decided the unit of the test."""

    def selftest_started(self, controls: int) -> None:
        """The controls are about to be shown to the checks."""

    def selftest_row(self, row: dict[str, Any]) -> None:
        """One control was run."""

    def selftest_done(self, ok: bool) -> None:
        """All controls were run; ``ok`` says whether each came out as it must."""

    def selftest_reused(self, controls: int) -> None:
        """An equal self-test is stored; it is not run again."""

    def started(self, cells: int, done: int, budget_s: float | None) -> None:
        """The sweep begins: ``done`` cells were finished by earlier calls, ``budget_s`` seconds are left."""

    def cell_started(self, cell: Cell) -> None:
        """A cell was taken from the queue."""

    def proof(self, column: Column, route: str, result: CheckResult) -> None:
        """A proof row was stored."""

    def verdict(self, column: Column, route: str, verdict: Verdict) -> None:
        """A route's verdict in a column is complete."""

    def cell_done(self, cell: Cell, decision: Decision) -> None:
        """A cell is finished and its rows are committed."""

    def cell_left(self, cell: Cell) -> None:
        """A cell was worked on and stays open; what its rows say stands."""

    def cell_again(self, cell: Cell, decision: Decision) -> None:
        """A finished cell was worked on once more, and this is its answer now; it is not counted again."""

    def warned(self, line: str) -> None:
        """Something went wrong that the run can do without, such as one of several devices."""

    def rechecking(self, cells: int, why: str) -> None:
        """So many cells are about to be timed again in fresh children; ``why`` in a few words."""

    def finished(self) -> None:
        """The sweep has ended, however it ended."""


class Silent:
    """Hears everything, says nothing; a base for who listens to a few events."""

    def pilot_done(self, pilot: Pilot) -> None: ...

    def selftest_started(self, controls: int) -> None: ...

    def selftest_row(self, row: dict[str, Any]) -> None: ...

    def selftest_done(self, ok: bool) -> None: ...

    def selftest_reused(self, controls: int) -> None: ...

    def started(self, cells: int, done: int, budget_s: float | None) -> None: ...

    def cell_started(self, cell: Cell) -> None: ...

    def proof(self, column: Column, route: str, result: CheckResult) -> None: ...

    def verdict(self, column: Column, route: str, verdict: Verdict) -> None: ...

    def cell_done(self, cell: Cell, decision: Decision) -> None: ...

    def cell_left(self, cell: Cell) -> None: ...

    def cell_again(self, cell: Cell, decision: Decision) -> None: ...

    def warned(self, line: str) -> None: ...

    def rechecking(self, cells: int, why: str) -> None: ...

    def finished(self) -> None: ...


class Several:
    """Tells several listeners the same, each event in the order in which they were given."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def pilot_done(self, pilot: Pilot) -> None:
        for each in self._listeners:
            each.pilot_done(pilot)

    def selftest_started(self, controls: int) -> None:
        for each in self._listeners:
            each.selftest_started(controls)

    def selftest_row(self, row: dict[str, Any]) -> None:
        for each in self._listeners:
            each.selftest_row(row)

    def selftest_done(self, ok: bool) -> None:
        for each in self._listeners:
            each.selftest_done(ok)

    def selftest_reused(self, controls: int) -> None:
        for each in self._listeners:
            each.selftest_reused(controls)

    def started(self, cells: int, done: int, budget_s: float | None) -> None:
        for each in self._listeners:
            each.started(cells, done, budget_s)

    def cell_started(self, cell: Cell) -> None:
        for each in self._listeners:
            each.cell_started(cell)

    def proof(self, column: Column, route: str, result: CheckResult) -> None:
        for each in self._listeners:
            each.proof(column, route, result)

    def verdict(self, column: Column, route: str, verdict: Verdict) -> None:
        for each in self._listeners:
            each.verdict(column, route, verdict)

    def cell_done(self, cell: Cell, decision: Decision) -> None:
        for each in self._listeners:
            each.cell_done(cell, decision)

    def cell_left(self, cell: Cell) -> None:
        for each in self._listeners:
            each.cell_left(cell)

    def cell_again(self, cell: Cell, decision: Decision) -> None:
        for each in self._listeners:
            each.cell_again(cell, decision)

    def warned(self, line: str) -> None:
        for each in self._listeners:
            each.warned(line)

    def rechecking(self, cells: int, why: str) -> None:
        for each in self._listeners:
            each.rechecking(cells, why)

    def finished(self) -> None:
        for each in self._listeners:
            each.finished()
