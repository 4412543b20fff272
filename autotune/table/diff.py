"""Which answers differ between two tables. Pure; letters are compared by what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from autotune.domain.dtypes import DTypes
from autotune.domain.shape import Shape
from autotune.table.model import Grid, RoutingTable

Batch: TypeAlias = "int | tuple[int, int]"
_Place: TypeAlias = "tuple[Shape, DTypes, int, int, Batch]"


@dataclass(frozen=True, slots=True)
class Change:
    """One place whose answer changed; None means that a table has no such place.

    ``batch`` is a captured size or an eager interval, ``kv_low`` and ``kv_high`` are inclusive, and both
    are None for the ``any`` row. ``before`` and ``after`` are route names or a reserved letter's meaning.
    """

    shape: Shape
    dtypes: DTypes
    q_len: int
    max_context: int
    batch: Batch
    kv_low: int | None
    kv_high: int | None
    before: str | None
    after: str | None


def diff_tables(old: RoutingTable, new: RoutingTable) -> tuple[Change, ...]:
    """Every change, in the order of ``old`` and then of what only ``new`` has.

    Rows are compared over the edges of both tables, so a row that was only split is not a change.
    """
    before, after = dict(_columns(old)), dict(_columns(new))
    changes: list[Change] = []
    for place in {**before, **after}:
        was, now = before.get(place, _Meanings()), after.get(place, _Meanings())
        if was.any != now.any:
            changes.append(Change(*place, None, None, was.any, now.any))
        low = place[2]
        for high in sorted({end for end, _ in (*was.rows, *now.rows)}):
            if (left := was.at(high)) != (right := now.at(high)):
                changes.append(Change(*place, low, high, left, right))
            low = high + 1
    return tuple(changes)


@dataclass(frozen=True, slots=True)
class _Meanings:
    """One column: ascending row ends with their meanings."""

    rows: tuple[tuple[int, str], ...] = ()
    any: str | None = None

    def at(self, kv_len: int) -> str | None:
        return next((meaning for end, meaning in self.rows if kv_len <= end), None)


def _columns(table: RoutingTable) -> Iterator[tuple[_Place, _Meanings]]:
    for entry in table.entries:
        grids: list[tuple[tuple[Batch, ...], Grid]] = [(entry.batch_size, entry.routes)]
        if entry.eager:
            grids.append((entry.eager.intervals, entry.eager.routes))
        for batches, grid in grids:
            for index, batch in enumerate(batches):
                rows = tuple((row.kv_high, table.legend[row.letters[index]]) for row in grid.rows)
                place = (entry.shape, entry.dtypes, entry.q_len, entry.max_context, batch)
                yield place, _Meanings(rows, table.legend[grid.any[index]])
