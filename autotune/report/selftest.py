"""The self-test as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from autotune.tuner.selftest import SelfTest


def selftest_text(test: SelfTest) -> RenderableType:
    """One line a control, failures in red, the count last."""
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "control", "expected", "got", ""):
        table.add_column(heading, overflow="fold")
    for row in test.results:
        mark = Text("ok", style="green") if row.ok else Text("FAILED", style="bold red")
        table.add_row(row.check, row.control, row.expected, row.got, mark)
    planted = [row for row in test.results if row.expected != "safe"]
    clean = [row for row in test.results if row.expected == "safe"]
    line = (
        f"{sum(row.detected for row in planted)} of {len(planted)} planted faults detected, "
        f"{sum(row.ok for row in clean)} of {len(clean)} clean runs passed"
    )
    return Group(table, Text(line, style="green" if test.ok else "bold red"))
