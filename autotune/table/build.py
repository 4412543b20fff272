"""From decided cells to the entries of a table.

Every letter is re-derived from cells that contain the whole place it stands for: a row is named only
where one decided cell covers it from end to end, an eager interval only where both captured ends,
every captured size between them and every sampled batch inside agree. A missing cell is ``?``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autotune.domain.cell import Cell
from autotune.domain.decision import FALLBACK_LETTERS, Decision
from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import Status, Verdict
from autotune.table.letters import RESERVED, UNPROVEN, agree, build_legend
from autotune.table.model import (
    Eager,
    Entry,
    Generated,
    Grid,
    Policy,
    Proof,
    Quarantine,
    Ratio,
    RoutingTable,
    Row,
    Speedup,
    Unsafe,
)
from autotune.table.quarantine import apply_quarantine
from autotune.table.validate import validate


@dataclass(frozen=True)
class DecidedCell:
    """One decision, with what the table shows beside it.

    ``verdict`` is the decided route's in this cell's column, ``fallback_error`` the fallback's worst
    error there; both are needed where ``decision.route`` is set. ``fallback_requires`` is what the
    fallback's proof there assumed, None where it is not proven.

    Raises:
        ValueError: a route without a safe verdict, a proven bound above 1 and both errors; or a route
            that is the fallback itself.
    """

    cell: Cell
    decision: Decision
    models: tuple[str, ...]
    fallback: str
    verdict: Verdict | None = None
    fallback_error: float | None = None
    fallback_requires: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        route, verdict = self.decision.route, self.verdict
        if route is None:
            return
        if route == self.fallback:
            raise ValueError(f"{self.cell}: route {route!r} is the fallback itself")
        if verdict is None or verdict.status is not Status.SAFE:
            raise ValueError(f"{self.cell}: route {route!r} has no safe verdict")
        if verdict.worst_error is None or self.fallback_error is None:
            raise ValueError(f"{self.cell}: route {route!r} or its fallback has no measured error")
        if self.decision.speedup_low is None or not self.decision.speedup_low > 1.0:
            raise ValueError(f"{self.cell}: route {route!r} has no proven bound above 1")


_Key = tuple[Shape, DTypes, int, int, str]


@dataclass
class _Group:
    """Cells of one entry, by captured size and by sampled batch inside an interval."""

    cells: list[DecidedCell] = field(default_factory=list)
    captured: dict[int, list[DecidedCell]] = field(default_factory=dict)
    inside: dict[tuple[int, int], dict[int, list[DecidedCell]]] = field(default_factory=dict)

    def add(self, cell: DecidedCell) -> None:
        column = cell.cell.column
        batches = self.inside.setdefault(column.interval, {}) if column.interval else self.captured
        self.cells.append(cell)
        batches.setdefault(column.batch_size, []).append(cell)


def build_table(
    cells: Sequence[DecidedCell],
    *,
    facts: Facts,
    generated: Generated,
    policy: Policy,
    families: Mapping[str, str],
    unsafe: Iterable[Unsafe] = (),
    quarantine: Iterable[Quarantine] = (),
) -> RoutingTable:
    """The whole table, validated, quarantine applied.

    Args:
        families: ``decode`` or ``context`` per route name; more routes than the table names will do.

    Raises:
        ValueError: cells contradict each other (see :func:`build_entries`), or were proven with another pad
            value than ``policy`` states.
        TableError: anything else inconsistent, such as a route without a family.
    """
    legend = build_legend(cell.decision.route for cell in cells if cell.decision.route)
    entries = build_entries(cells)
    for cell in cells:
        if cell.cell.column.pad_value != policy.pad_value:
            raise ValueError(
                f"{cell.cell}: proven with pad_value {cell.cell.column.pad_value}; "
                f"engine {policy.engine} pads with {policy.pad_value}"
            )
    named = {name for letter, name in legend.items() if letter not in RESERVED}
    named |= {entry.fallback for entry in entries} | {policy.stock or ""}
    table = apply_quarantine(
        RoutingTable(
            generated=generated,
            facts=facts,
            policy=policy,
            legend=legend,
            families={name: family for name, family in sorted(families.items()) if name in named},
            entries=entries,
            unsafe=tuple(unsafe),
            quarantine=tuple(quarantine),
        )
    )
    validate(table)
    return table


def build_entries(cells: Sequence[DecidedCell]) -> tuple[Entry, ...]:
    """Entries in a fixed order (shape, dtypes, q_len, max context, fallback), letters from the routes named.

    Columns with ``interval`` are samples inside an eager interval and never captured sizes. An interval
    whose ends were not both captured is left out: nothing could be claimed there.

    Raises:
        ValueError: two cells of one column overlap, two fallbacks are given for one batch size, or cells of
            engines that pad differently are mixed: a table has one pad value.
    """
    if len(pads := sorted({cell.cell.column.pad_value for cell in cells})) > 1:
        raise ValueError(f"cells proven with pad_value {pads[0]} and {pads[1]} cannot share a table")
    legend = build_legend(cell.decision.route for cell in cells if cell.decision.route)
    letter_of = {name: letter for letter, name in legend.items() if letter not in RESERVED}
    groups: dict[_Key, _Group] = {}
    owner: dict[object, str] = {}
    for cell in cells:
        column = cell.cell.column
        # An interval has one fallback too: else a sample that disagrees would end up in another entry.
        place = (
            *(column.shape, column.dtypes, column.q_len, column.max_context),
            column.interval or column.batch_size,
        )
        if owner.setdefault(place, cell.fallback) != cell.fallback:
            raise ValueError(f"{column}: two fallbacks, {owner[place]!r} and {cell.fallback!r}")
        key = (column.shape, column.dtypes, column.q_len, column.max_context, cell.fallback)
        groups.setdefault(key, _Group()).add(cell)
    return tuple(
        _entry(key, groups[key], letter_of) for key in sorted(groups, key=_order) if groups[key].captured
    )


def _order(key: _Key) -> tuple[object, ...]:
    shape, dtypes, q_len, max_context, fallback = key
    return (*shape.to_dict().values(), dtypes, q_len, max_context, fallback)


def _entry(key: _Key, group: _Group, letter_of: Mapping[str, str]) -> Entry:
    shape, dtypes, q_len, max_context, fallback = key
    ends = _row_ends(group.cells, q_len)
    sizes = tuple(sorted(group.captured))
    captured = {size: _column(group.captured[size], ends, q_len) for size in sizes}
    columns = [[column] for column in captured.values()]
    routes = _grid(columns, ends, max_context, letter_of)
    eager = _eager(group, captured, ends, q_len, max_context, letter_of)
    named = {letter for row in routes.rows for letter in row.letters}  # an interval names no route beyond
    return Entry(
        shape=shape,
        dtypes=dtypes,
        models=tuple(sorted({model for cell in group.cells for model in cell.models})),
        fallback=fallback,
        max_context=max_context,
        q_len=q_len,
        batch_size=sizes,
        routes=routes,
        speedup=_speedup(columns, routes),
        proof=tuple(_proof(name, group.cells) for name in sorted(letter_of) if letter_of[name] in named),
        eager=eager,
        fallback_requires=_assumed(group.cells),
    )


_Column = list["DecidedCell | None"]  # one item per row


def _row_ends(cells: Iterable[DecidedCell], q_len: int) -> list[int]:
    # Every edge of every cell: then a cell covers each row wholly or not at all.
    ends = {cell.cell.kv_high for cell in cells}
    return sorted(ends | {cell.cell.kv_low - 1 for cell in cells if cell.cell.kv_low > q_len})


def _column(cells: Sequence[DecidedCell], ends: Sequence[int], q_len: int) -> _Column:
    column: _Column = []
    low = q_len
    for end in ends:
        covering = [cell for cell in cells if cell.cell.kv_low <= low and end <= cell.cell.kv_high]
        if len(covering) > 1:
            raise ValueError(f"{covering[0].cell} and {covering[1].cell} overlap")
        column.append(covering[0] if covering else None)
        low = end + 1
    return column


def _eager(
    group: _Group,
    captured: Mapping[int, _Column],
    ends: Sequence[int],
    q_len: int,
    max_context: int,
    letter_of: Mapping[str, str],
) -> Eager | None:
    intervals = [span for span in sorted(group.inside) if span[0] in captured and span[1] in captured]
    for left, right in pairwise(intervals):
        if right[0] < left[1]:
            raise ValueError(f"eager intervals {left} and {right} overlap")
    if not intervals:
        return None
    columns = [
        [column for size, column in captured.items() if low <= size <= high]
        + [_column(cells, ends, q_len) for cells in group.inside[low, high].values()]
        for low, high in intervals
    ]
    routes = _grid(columns, ends, max_context, letter_of)
    return Eager(tuple(intervals), routes, _speedup(columns, routes))


def _grid(
    columns: Sequence[Sequence[_Column]], ends: Sequence[int], max_context: int, letter_of: Mapping[str, str]
) -> Grid:
    """``columns`` holds, for each letter of a row, the columns that must agree on it."""
    rows = tuple(
        Row(
            end,
            "".join(agree(_letter(column[index], letter_of) for column in together) for together in columns),
        )
        for index, end in enumerate(ends)
    )
    return Grid.of(rows, max_context)


def _letter(cell: DecidedCell | None, letter_of: Mapping[str, str]) -> str:
    if cell is None:
        return UNPROVEN
    if cell.decision.route is not None:
        return letter_of[cell.decision.route]
    return FALLBACK_LETTERS[cell.decision.reason]


def _speedup(columns: Sequence[Sequence[_Column]], grid: Grid) -> Speedup:
    low: list[tuple[Ratio, ...]] = []
    vs_stock: list[tuple[Ratio, ...]] = []
    for index, row in enumerate(grid.rows):
        cells = [[column[index] for column in together] for together in columns]
        low.append(
            tuple(
                None if letter in RESERVED else _least(cell.decision.speedup_low for cell in group if cell)
                for letter, group in zip(row.letters, cells, strict=True)
            )
        )
        vs_stock.append(
            tuple(_least(cell.decision.vs_stock if cell else None for cell in group) for group in cells)
        )
    return Speedup(tuple(low), tuple(vs_stock))


def _least(values: Iterable[Ratio]) -> Ratio:
    """The least, rounded down to 4 decimals so that no bound is overstated; None if any is missing."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    if not known or len(known) < len(listed):
        return None
    least = min(known)
    rounded = math.floor(least * 10_000) / 10_000
    # A bound so close to 1 (or to 0) that rounding would cross it keeps its digits.
    return rounded if rounded > 1.0 or (rounded > 0.0 and least <= 1.0) else least


def _assumed(cells: Iterable[DecidedCell]) -> tuple[str, ...] | None:
    """All that the fallback's proofs assumed; None where there is no proof."""
    stated = [cell.fallback_requires for cell in cells if cell.fallback_requires is not None]
    return tuple(sorted({need for needs in stated for need in needs})) if stated else None


def _proof(route: str, cells: Iterable[DecidedCell]) -> Proof:
    named = [(cell, cell.verdict) for cell in cells if cell.decision.route == route and cell.verdict]
    verdicts = [verdict for _, verdict in named]
    # A column's launches prove all of its rows: counted once.
    launches = {cell.cell.column.id: verdict.launches for cell, verdict in named}
    return Proof(
        route=route,
        checks=min(verdict.checks for verdict in verdicts),
        launches=sum(launches.values()),
        worst_error=max(verdict.worst_error or 0.0 for verdict in verdicts),
        fallback_error=max(cell.fallback_error or 0.0 for cell, _ in named),
        requires=tuple(sorted({need for verdict in verdicts for need in verdict.requires})),
        limits=tuple(sorted({limit for verdict in verdicts for limit in verdict.limits})),
    )
