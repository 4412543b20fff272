"""A routing table for people: coloured letters, and the same as JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from autotune.table.model import Entry, Grid, RoutingTable

STYLES = {".": "dim", "!": "bold red", "?": "yellow", "x": "dim", "#": "bold white on red", "q": "magenta"}
ROUTE_STYLES = ("bold green", "bold cyan", "bold blue", "bold magenta")


def table_json(table: RoutingTable) -> dict[str, Any]:
    """The model as plain values."""
    data = dataclasses.asdict(dataclasses.replace(table, facts=None))  # type: ignore[arg-type]
    data["facts"] = table.facts.to_dict()
    data["legend"], data["families"] = dict(table.legend), dict(table.families)
    data["digest"] = table.digest
    return data


def table_text(table: RoutingTable) -> RenderableType:
    """Header, one grid an entry, legend, accusations."""
    styles = _styles(table)
    hardware = ", ".join(f"{key} {value}" for key, value in table.facts.hardware.items())
    software = ", ".join(f"{key} {value}" for key, value in table.facts.software.items())
    policy = table.policy
    parts: list[RenderableType] = [
        Text(f"{hardware}"),
        Text(f"{software}", style="dim"),
        Text(
            f"engine {policy.engine}, stock {policy.stock}, objective {policy.objective}, margin "
            f"{policy.margin:g}, pad {policy.pad_value}, any false claim <= {policy.any_false_claim:g}; "
            f"{table.generated.by}, {table.generated.at}",
            style="dim",
        ),
    ]
    for entry in table.entries:
        parts += ["", _title(entry), _grid(entry, styles)]
    used = {
        letter
        for entry in table.entries
        for grid in entry.grids
        for row in grid.rows
        for letter in row.letters
    }
    parts.append("")
    for letter, meaning in table.legend.items():
        if letter in used or letter not in STYLES:
            parts.append(Text.assemble((letter, styles.get(letter, "")), f"  {meaning}"))
    for item in table.unsafe:
        parts.append(Text(f"unsafe: {item.route} {item.kind} in {item.cell}: {item.detail}", style="red"))
    for held in table.quarantine:
        parts.append(Text(f"quarantined: {held.route}: {held.reason}", style="magenta"))
    return Group(*parts)


def _styles(table: RoutingTable) -> dict[str, str]:
    routes = [letter for letter in table.legend if letter not in STYLES]
    return {**STYLES, **{letter: ROUTE_STYLES[i % len(ROUTE_STYLES)] for i, letter in enumerate(routes)}}


def _title(entry: Entry) -> Text:
    shape, dtypes = entry.shape, entry.dtypes
    extras = [f"window {shape.window_left}"] if shape.window_left >= 0 else []
    extras += ["sinks"] if shape.sinks else []
    return Text.assemble(
        (
            f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim} page {shape.page_size} "
            f"{dtypes.q}/{dtypes.kv}/{dtypes.out} q_len {entry.q_len}",
            "bold",
        ),
        f"  {', '.join([*extras, *entry.models])}  (fallback {entry.fallback}, context {entry.max_context})",
    )


def _grid(entry: Entry, styles: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("kv \\ batch", justify="right", style="dim")
    for size in entry.batch_size:
        table.add_column(str(size), justify="right")
    for low, high in entry.eager.intervals if entry.eager else ():
        table.add_column(f"{low}..{high}", justify="right")
    eager = entry.eager.routes if entry.eager else None
    for index, row in enumerate(entry.routes.rows):
        letters = row.letters + (eager.rows[index].letters if eager else "")
        table.add_row(f"<= {row.kv_high}", *(Text(letter, styles.get(letter, "")) for letter in letters))
    letters = entry.routes.any + (_any(eager))
    table.add_row("any", *(Text(letter, styles.get(letter, "")) for letter in letters))
    return table


def _any(grid: Grid | None) -> str:
    return grid.any if grid is not None else ""
