"""The cells of a search space under one engine, each per-rank shape once."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES, DTypes
from autotune.domain.identity import stable_id
from autotune.domain.shape import Shape
from autotune.space.engine import Engine
from autotune.space.errors import SpaceError
from autotune.space.model import per_rank_shape
from autotune.space.reader import listed
from autotune.space.space import ModelUse, Space


@dataclass(frozen=True, slots=True)
class SpaceCell:
    """A cell and the models that make this call, such as ``llama-3.1-70b @ attn_tp 8``."""

    cell: Cell
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One block of a table: a shape, its dtypes and a q_len; batch sizes across, KV rows down.

    Attributes:
        profile: the precision profile that names ``dtypes`` on the command line.
        uses: the models that share this shape.
        columns: captured batch sizes ascending, then the interiors of eager intervals.
        rows: ``(kv_low, kv_high)``, both inclusive; without a gap from q_len on, unless filtered.
        intervals: the eager intervals of batch sizes, those without an interior too.
    """

    shape: Shape
    profile: str
    dtypes: DTypes
    q_len: int
    max_context: int
    uses: tuple[ModelUse, ...]
    columns: tuple[Column, ...]
    rows: tuple[tuple[int, int], ...]
    intervals: tuple[tuple[int, int], ...]

    @property
    def models(self) -> tuple[str, ...]:
        """Labels of the models that share this shape."""
        return tuple(use.label for use in self.uses)

    @property
    def layers(self) -> dict[str, int]:
        """Layers that make this call, by label; the ``step`` objective weighs host work with them."""
        return {use.label: use.layer_kind.layers for use in self.uses}

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Captured batch sizes."""
        return tuple(column.batch_size for column in self.columns if column.interval is None)

    def cells(self) -> list[SpaceCell]:
        """Column by column, KV rows ascending."""
        return [
            SpaceCell(Cell(column, low, high), self.models)
            for column in self.columns
            for low, high in self.rows
        ]


@dataclass(frozen=True)
class Grid:
    """What one run measures, in a fixed order.

    Attributes:
        dropped_kv: KV rows of the space that lie past the maximum context and are left out.
        limit: at most this many cells, the first ones; None for all.
        whole: the grid of which single cells were picked: what can be claimed is counted over that.
    """

    space: Space
    engine: Engine
    entries: tuple[Entry, ...]
    dropped_kv: tuple[int, ...] = ()
    limit: int | None = None
    whole: Grid | None = None

    @cached_property
    def cells(self) -> tuple[SpaceCell, ...]:
        """Every cell once."""
        return tuple(cell for entry in self.entries for cell in entry.cells())[: self.limit]

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Every column that has a cell, once."""
        return tuple(dict.fromkeys(item.cell.column for item in self.cells))

    @property
    def architecture(self) -> str:
        """``cpu``, or ``sm90`` and the like."""
        return self.space.device.architecture

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the identities of the cells: equal for equal work."""
        return stable_id([item.cell.id for item in self.cells], 16)

    def restrict(
        self,
        *,
        models: Collection[str] | None = None,
        attn_tp: Collection[int] | None = None,
        dtypes: Collection[str] | None = None,
        q_len: Collection[int] | None = None,
        batch: Collection[int] | None = None,
        kv: Collection[int] | None = None,
        trials: int | None = None,
    ) -> Grid:
        """The part of this grid that the filters name; None leaves an axis whole.

        A cell keeps its identity: ``kv`` drops rows and does not widen the ones that stay. An eager
        interval stays where both its ends do. ``trials`` keeps the first cells.

        Raises:
            SpaceError: a value is not in the space, or nothing is left.
        """
        if trials is not None and trials < 1:
            raise SpaceError(f"--trials {trials}: must be an integer >= 1")
        uses = list(dict.fromkeys(use for entry in self.entries for use in entry.uses))
        columns = [column for entry in self.entries for column in entry.columns]
        _known("--models", models, dict.fromkeys(use.model.name for use in uses))
        _known("--attn-tp", attn_tp, sorted({use.attn_tp for use in uses}))
        _known("--dtype", dtypes, dict.fromkeys(entry.profile for entry in self.entries))
        _known("--q-len", q_len, sorted({column.q_len for column in columns}))
        _known("--batch", batch, sorted({size for entry in self.entries for size in entry.batch_sizes}))
        _known("--kv", kv, sorted({high for entry in self.entries for _, high in entry.rows}))
        kept = []
        for entry in self.entries:
            shared = tuple(
                use
                for use in entry.uses
                if (models is None or use.model.name in models)
                and (attn_tp is None or use.attn_tp in attn_tp)
            )
            rows = tuple(row for row in entry.rows if kv is None or row[1] in kv)
            inside = tuple(
                (low, high)
                for low, high in entry.intervals
                if batch is None or (low in batch and high in batch)
            )
            taken = tuple(
                column
                for column in entry.columns
                if (
                    column.interval in inside
                    if column.interval
                    else batch is None or column.batch_size in batch
                )
            )
            wanted = (dtypes is None or entry.profile in dtypes) and (q_len is None or entry.q_len in q_len)
            if wanted and shared and rows and taken:
                kept.append(replace(entry, uses=shared, rows=rows, columns=taken, intervals=inside))
        if not kept:
            raise SpaceError(f"{self.space.file}: the filters leave no cell: no entry has all these values")
        limit = trials if self.limit is None else min(self.limit, trials or self.limit)
        return replace(self, entries=tuple(kept), limit=limit)

    def pick(self, ids: Collection[str]) -> Grid:
        """Exactly the cells with these ids, in this grid's order; each column keeps only their rows.

        A cell keeps its identity, and a claim about it needs the evidence that it needs in the whole grid.

        Raises:
            SpaceError: an id is not in this grid, or none is given.
        """
        wanted = set(ids)
        if not wanted:
            raise SpaceError(f"{self.space.file}: no cell is picked")
        if unknown := wanted - {item.cell.id for item in self.cells}:
            raise SpaceError(f"{self.space.file}: there is no cell {min(unknown)}")
        kept = []
        for entry in self.entries:
            for column in entry.columns:
                rows = tuple(row for row in entry.rows if Cell(column, *row).id in wanted)
                if rows:
                    inside = (column.interval,) if column.interval else ()
                    kept.append(replace(entry, columns=(column,), rows=rows, intervals=inside))
        return replace(self, entries=tuple(kept), limit=None, whole=self.whole or self)


def _known(flag: str, wanted: Collection[object] | None, has: Collection[object]) -> None:
    if wanted is None:
        return
    if not wanted:
        raise SpaceError(f"{flag}: names nothing; the space has {listed(has)}")
    for value in wanted:
        if value not in has:
            raise SpaceError(f"{flag} {value}: not in the space, which has {listed(has)}")


def interior(low: int, high: int) -> int | None:
    """The batch size sampled strictly inside ``(low, high)``: fixed by the interval; None if there is none.

    It is hashed, not the middle: a middle between powers of two is round, and kernels treat round sizes well.
    """
    if high - low < 2:
        return None
    word = hashlib.sha256(f"{low}..{high}".encode()).digest()[:8]
    return low + 1 + int.from_bytes(word, "big") % (high - low - 1)


def kv_rows(ends: Sequence[int], q_len: int, max_context: int) -> tuple[tuple[int, int], ...]:
    """``(kv_low, kv_high)`` of each row, the first from q_len, without gaps; none past max_context."""
    rows, low = [], q_len
    for high in ends:
        if low <= high <= max_context:
            rows.append((low, high))
            low = high + 1
    return tuple(rows)


def expand(space: Space, engine: Engine) -> Grid:
    """Every cell of ``space`` as ``engine`` would call it.

    Models whose ranks see the same shape share an entry. Order: models as in the file, then layer kinds,
    dtypes, q_len, batch sizes, KV rows.

    Raises:
        SpaceError: the engine has no profile for the device, pads past max_context, or nothing is left below
            max_context.
    """
    place = engine.on(space.device.architecture)
    max_context = space.max_context or engine.max_context
    if engine.pad_value > max_context:
        raise SpaceError(
            f"engine {engine.name}: pad_value {engine.pad_value} lies past max_context {max_context}"
        )
    batches = space.batch_size or engine.capture_sizes
    shared: dict[Shape, list[ModelUse]] = {}
    for use in space.uses():
        shape = per_rank_shape(use.model, use.layer_kind, use.attn_tp, place.page_size, place.kv_layout)
        shared.setdefault(shape, []).append(use)
    entries = []
    for shape, uses in shared.items():
        for profile in space.dtypes:
            for q_len in space.q_len:
                rows = kv_rows(space.kv_len, q_len, max_context)
                if not rows:
                    continue
                sizes: list[tuple[int, tuple[int, int] | None]] = [(size, None) for size in batches]
                for low, high in space.eager:
                    if (size := interior(low, high)) is not None:
                        sizes.append((size, (low, high)))
                dtypes = PROFILES[profile]
                entries.append(
                    Entry(
                        shape=shape,
                        profile=profile,
                        dtypes=dtypes,
                        q_len=q_len,
                        max_context=max_context,
                        uses=tuple(uses),
                        columns=tuple(
                            Column(shape, dtypes, q_len, size, max_context, interval, engine.pad_value)
                            for size, interval in sizes
                        ),
                        rows=rows,
                        intervals=space.eager,
                    )
                )
    if not entries:
        raise SpaceError(f"{space.file}: kv_len: no row fits below max_context {max_context}")
    return Grid(space, engine, tuple(entries), tuple(end for end in space.kv_len if end > max_context))
