"""Live progress on stderr: cells done, rate, time left, verdicts so far, the last unsafe cell."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

    from autotune.domain.cell import Cell, Column
    from autotune.domain.decision import Decision
    from autotune.domain.verdict import CheckResult, Verdict
    from autotune.tuner.pilot import Pilot

# Without a terminal (CI) a line of progress at most this often.
LINE_EVERY_S = 10.0


class ProgressView:
    """A :class:`autotune.tuner.listener.Listener` that draws with Rich; plain lines where there is no tty.

    A context manager: the terminal is given back however the run ends.

    Args:
        budgeted: whether the budget is of this process's time, and so bounds the time left.
    """

    def __init__(self, console: Console, *, budgeted: bool = True) -> None:
        self.console = console
        self._budgeted = budgeted
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._verdicts: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()
        self._last_unsafe = ""
        self._started = 0.0
        self._said = 0.0
        self._budget: float | None = None
        self._done_before = 0
        self._total = 0
        self._done = 0

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finished()

    def _say(self, line: str) -> None:
        """A line that stays, above the bar on a terminal."""
        self.console.print(Text(line), soft_wrap=True)

    def _begin(self, description: str, total: int, done: int = 0) -> None:
        if self.console.is_terminal and not self._live.is_started:
            self._live.start()
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(description, total=total, completed=done, rate="")
        self._draw()

    def _draw(self) -> None:
        if not self._live.is_started:
            return
        lines = [
            Text(f"{title}: {_counts(counter)}")
            for title, counter in (("verdicts", self._verdicts), ("decisions", self._decisions))
            if counter
        ]
        if self._last_unsafe:
            lines.append(Text(f"last unsafe: {self._last_unsafe}", style="red"))
        self._live.update(Group(self._bar, *lines))

    def pilot_done(self, pilot: Pilot) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._say(pilot.detail)

    def selftest_started(self, controls: int) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._say(f"self-test: {controls} controls")
        self._begin("self-test", controls)

    def selftest_row(self, row: dict[str, Any]) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        if self._task is not None:
            self._bar.advance(self._task)
        self._draw()

    def selftest_done(self, ok: bool) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._say("self-test: passed" if ok else "self-test: FAILED")

    def selftest_reused(self, controls: int) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._say(f"self-test: {controls} controls passed before, on this machine with this code")

    def started(self, cells: int, done: int, budget_s: float | None) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._started, self._budget = time.monotonic(), budget_s if self._budgeted else None
        self._said = self._started
        self._done_before, self._done, self._total = done, done, cells
        self._say(f"cells: {cells}, {done} of them settled by earlier calls" if done else f"cells: {cells}")
        self._begin("cells", cells, done)

    def cell_started(self, cell: Cell) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""

    def proof(self, column: Column, route: str, result: CheckResult) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""

    def verdict(self, column: Column, route: str, verdict: Verdict) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._verdicts[verdict.status.value] += 1
        if verdict.kind is not None:
            self._last_unsafe = f"{route} {verdict.kind.value} in {column} ({verdict.check})"
            self._say(f"unsafe: {self._last_unsafe}")
        self._draw()

    def cell_left(self, cell: Cell) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""

    def cell_again(self, cell: Cell, decision: Decision) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""

    def cell_done(self, cell: Cell, decision: Decision) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._done += 1
        self._decisions[decision.route or decision.reason.value] += 1
        now = time.monotonic()
        elapsed = max(now - self._started, 1e-9)
        rate = (self._done - self._done_before) / elapsed
        left = (self._total - self._done) / rate
        if self._budget is not None:
            left = min(left, max(self._budget - elapsed, 0.0))
        pace = f"{rate * 60:.0f} cells/min, {left:.0f} s left"
        if self._task is not None:
            self._bar.update(self._task, completed=self._done, rate=pace)
        if not self._live.is_started and (now - self._said >= LINE_EVERY_S or self._done == self._total):
            self._said = now
            self._say(f"{self._done}/{self._total} cells, {pace}; {_counts(self._decisions)}")
        self._draw()

    def warned(self, line: str) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._say(f"autotune: {line}")

    def rechecking(self, cells: int, why: str) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._say(f"timing {cells} {'cell' if cells == 1 else 'cells'} again, {why}")

    def finished(self) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        if self._live.is_started:
            self._live.stop()


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))
