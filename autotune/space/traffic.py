"""A traffic file -> weights of cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.domain.traffic import ShapeCount
from autotune.space.errors import SpaceError

if TYPE_CHECKING:
    from pathlib import Path

    from autotune.domain.cell import Cell, Column


@dataclass(frozen=True)
class Weights:
    """How much traffic each cell has.

    Attributes:
        by_cell: calls by cell id; a cell that is not there has none.
        calls: in the file.
        unmatched: of them, those that no cell contains.
    """

    by_cell: Mapping[str, float]
    calls: int
    unmatched: int

    @property
    def said(self) -> str:
        """One line: what the file covers."""
        text = f"traffic: {self.calls} calls in {len(self.by_cell)} cells"
        if not self.unmatched:
            return text
        share = self.unmatched / self.calls
        return f"{text}; {self.unmatched} of them ({share:.0%}) match no cell of this space"


def read_traffic(path: Path) -> tuple[ShapeCount, ...]:
    """The shapes of a file that an engine wrote; blank lines are nothing.

    Raises:
        SpaceError: it cannot be read, a line is malformed (file, line, key), or there is none.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SpaceError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpaceError(f"{path}: not UTF-8 text (byte {error.start})") from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(ShapeCount.parse(line))
        except ValueError as error:
            raise SpaceError(f"{path} line {number}: {error}") from None
    if not found:
        raise SpaceError(f"{path}: no shape in it; an engine writes it with AUTOTUNE_TRAFFIC set")
    return tuple(found)


def weigh(shapes: Iterable[ShapeCount], cells: Iterable[Cell]) -> Weights:
    """Spread calls over the cells that contain them.

    A call belongs to the KV row that contains its bucket's upper end, or to the last one where the bucket
    reaches past the maximum context. One without a length is spread evenly over the rows of its column: which
    one it was nobody knows. A batch size that was captured exactly belongs to that column, another one to the
    eager interval around it. A file names no model: every shape of the space gets the calls.
    """
    columns: dict[Column, list[Cell]] = {}
    for cell in cells:
        columns.setdefault(cell.column, []).append(cell)
    by_cell: dict[str, float] = {}
    calls = unmatched = 0
    for shape in shapes:
        calls += shape.count
        takers = _columns(shape, columns)
        rows = [row for column in takers if (row := _rows(shape, columns[column]))]
        for found in rows:
            for cell in found:
                by_cell[cell.id] = by_cell.get(cell.id, 0.0) + shape.count / len(found)
        if not rows:
            unmatched += shape.count
    return Weights(by_cell, calls, unmatched)


def _columns(shape: ShapeCount, columns: Iterable[Column]) -> list[Column]:
    same = [column for column in columns if column.q_len == shape.q_len]
    exact = [column for column in same if column.interval is None and column.batch_size == shape.batch]
    captured = {(column.shape, column.dtypes) for column in exact}
    inside = [
        column
        for column in same
        if column.interval is not None
        and column.interval[0] <= shape.batch <= column.interval[1]
        and (column.shape, column.dtypes) not in captured
    ]
    return exact + inside


def _rows(shape: ShapeCount, cells: list[Cell]) -> list[Cell]:
    if shape.kv is None:
        return cells
    longest = cells[0].column.max_context
    kv = min(shape.kv, longest) if shape.kv // 2 < longest else shape.kv
    return [cell for cell in cells if cell.kv_low <= kv <= cell.kv_high]
