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
    from autotune.domain.cell import Cell, Column
    from autotune.domain.decision import Decision
    from autotune.domain.verdict import CheckResult, Verdict


class ProgressView:
    """A :class:`autotune.tuner.listener.Listener` that draws with Rich; plain lines where there is no tty."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=console,
        )
        self._task: TaskID | None = None
        self._live: Live | None = None
        self._verdicts: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()
        self._last_unsafe = ""
        self._started = 0.0
        self._budget: float | None = None
        self._done_before = 0
        self._total = 0
        self._done = 0

    def _draw(self) -> None:
        if self._live is None:
            return
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self._verdicts.items())) or "none yet"
        routes = ", ".join(f"{count} {name}" for name, count in sorted(self._decisions.items())) or "none yet"
        lines = [Text(f"verdicts: {counts}"), Text(f"decisions: {routes}")]
        if self._last_unsafe:
            lines.append(Text(f"last unsafe: {self._last_unsafe}", style="red"))
        self._live.update(Group(self._bar, *lines))

    def _begin(self, description: str, total: int, done: int = 0) -> None:
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            if self.console.is_terminal:
                self._live.start()
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(description, total=total, completed=done, rate="")
        self._draw()

    def selftest_started(self, controls: int) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._begin("self-test", controls)

    def selftest_row(self, row: dict[str, Any]) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        if self._task is not None:
            self._bar.advance(self._task)
        self._draw()

    def selftest_reused(self, controls: int) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self.console.print(f"self-test: {controls} controls, as stored for this machine and code")

    def started(self, cells: int, done: int, budget_s: float | None) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._started, self._budget = time.monotonic(), budget_s
        self._done_before, self._done, self._total = done, done, cells
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
            if not self.console.is_terminal:
                self.console.print(f"unsafe: {self._last_unsafe}")
        self._draw()

    def cell_done(self, cell: Cell, decision: Decision) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        self._done += 1
        self._decisions[decision.route or decision.reason.value] += 1
        elapsed = max(time.monotonic() - self._started, 1e-9)
        rate = (self._done - self._done_before) / elapsed
        left = (self._total - self._done) / rate
        if self._budget is not None:
            left = min(left, max(self._budget - elapsed, 0.0))
        if self._task is not None:
            self._bar.update(
                self._task, completed=self._done, rate=f"{rate * 60:.0f} cells/min, {left:.0f} s left"
            )
        if not self.console.is_terminal and (self._done % 10 == 0 or self._done == self._total):
            self.console.print(
                f"{self._done}/{self._total} cells, {rate * 60:.0f} cells/min, {left:.0f} s left"
            )
        self._draw()

    def finished(self) -> None:
        """See :class:`autotune.tuner.listener.Listener`."""
        if self._live is not None and self._live.is_started:
            self._live.stop()
        self._live = None
