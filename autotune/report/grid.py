"""A routing table for people: coloured letters, and the same as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from autotune.table.model import Entry, Grid, Policy, RoutingTable

STYLES = {".": "dim", "!": "bold red", "?": "yellow", "x": "dim", "#": "bold white on red", "q": "magenta"}
ROUTE_STYLES = ("bold green", "bold cyan", "bold blue", "bold magenta")


def ratio(value: float | None) -> str:
    """Three decimals, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def table_json(table: RoutingTable) -> dict[str, Any]:
    """The model as plain values, every part of it by its name."""
    data = {field.name: _plain(getattr(table, field.name)) for field in dataclasses.fields(table)}
    return {**data, "facts": table.facts.to_dict()}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):  # a named tuple, which JSON would write as a list
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def objective_text(policy: Policy) -> str:
    """``step (15 layers, 50 % of prepare hidden)``; only what the export chose is said."""
    said = [] if policy.layers is None else [f"{policy.layers} layer{'' if policy.layers == 1 else 's'}"]
    if policy.hidden_prepare is not None:
        said.append(f"{100 * policy.hidden_prepare:g} % of prepare hidden")
    return f"{policy.objective} ({', '.join(said)})" if said else policy.objective


def table_text(table: RoutingTable) -> RenderableType:
    """Header, one grid an entry, legend, accusations."""
    styles = _styles(table)
    hardware = ", ".join(f"{key} {value}" for key, value in table.facts.hardware.items())
    software = ", ".join(f"{key} {value}" for key, value in table.facts.software.items())
    policy = table.policy
    tau = "not measured" if policy.shift is None else f"{policy.shift:g}"
    parts: list[RenderableType] = [
        Text(f"{hardware}"),
        Text(f"{software}", style="dim"),
        Text(
            f"engine {policy.engine}, stock {policy.stock}, objective {objective_text(policy)}, "
            f"margin {policy.margin:g}, tau {tau}, pad {policy.pad_value}, any false claim <= "
            f"{policy.any_false_claim:g}; {table.generated.by}, {table.generated.at}",
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
    assumed = f", proven with {', '.join(entry.fallback_requires)}" if entry.fallback_requires else ""
    return Text.assemble(
        (
            f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim} page {shape.page_size} "
            f"{dtypes.q}/{dtypes.kv}/{dtypes.out} q_len {entry.q_len}",
            "bold",
        ),
        f"  {', '.join([*extras, *entry.models])}"
        f"  (fallback {entry.fallback}{assumed}; context {entry.max_context})",
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
