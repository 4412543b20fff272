"""What a routing table says, as plain values. ``validate`` says which tables are consistent.

Rows: a row with ``kv_high`` 1024 covers total KV lengths from one past the previous row's end (the first
row: from ``q_len``) up to and including 1024. Columns: exact captured batch sizes, or eager intervals.

The leaves are named tuples: creating a frozen dataclass costs a serving process 0.7 ms at import, a named
tuple 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.table.letters import UNPROVEN, agree

SCHEMA_FAMILY = "autotune/routing-table/"
SCHEMA_VERSION = 1
SCHEMA = f"{SCHEMA_FAMILY}{SCHEMA_VERSION}"

Ratio: TypeAlias = "float | None"


class Generated(NamedTuple):
    """Who made the table: package and version, UTC time ``YYYY-MM-DDTHH:MM:SSZ``, the study's id."""

    by: str
    at: str
    study: str


class Policy(NamedTuple):
    """How decisions were made. ``stock`` is what the engine calls by itself, None if nothing.

    ``margin`` and ``tau`` are relative (0.02 is 2 %). ``margin`` is the one that was applied: the study's
    floor, or 3 tau if that is more. ``tau`` is the shift of a ratio between processes, None where it was not
    measured; older tables have 0.0 for that. ``any_false_claim`` is the chance that any "faster" in the table
    is false. ``pad_value`` is the KV length of the engine's padded rows, with which every proof of the table
    was made. ``layers`` and ``hidden_prepare`` say what ``step`` counted where that was chosen at the export:
    layers that share a preparation (None: the models' own), and the share of the preparation that the engine
    hides (None: nothing).
    """

    engine: str
    stock: str | None
    objective: str
    margin: float
    tau: Ratio
    any_false_claim: float
    pad_value: int = 1
    layers: int | None = None
    hidden_prepare: float | None = None

    @property
    def shift(self) -> Ratio:
        """Tau, or None where it was not measured, in older tables too."""
        return self.tau or None


class Row(NamedTuple):
    """One letter per column, for KV lengths up to and including ``kv_high``."""

    kv_high: int
    letters: str


class Grid(NamedTuple):
    """Rows in ascending order, and the ``any`` row for callers that do not know the KV length."""

    rows: tuple[Row, ...]
    any: str

    @classmethod
    def of(cls, rows: tuple[Row, ...], max_context: int) -> Grid:
        """Rows with their derived ``any`` row. Rows must have equal lengths."""
        return cls(rows, derive_any(rows, max_context))


def derive_any(rows: tuple[Row, ...], max_context: int) -> str:
    """Per column, a route only if every row names it and the rows reach ``max_context``.

    Rows that stop short leave lengths a caller may have and nobody proved; they count as ``?``.
    """
    columns = [list(column) for column in zip(*(row.letters for row in rows), strict=True)]
    if not rows or rows[-1].kv_high < max_context:
        columns = [[*column, UNPROVEN] for column in columns]
    return "".join(agree(column) for column in columns)


class Speedup(NamedTuple):
    """Ratios per row and column, aligned with a grid; None where there is none.

    ``low`` is the proven lower bound of time(fallback) / time(route), present exactly where a route is
    named. ``vs_stock`` is the median of time(stock) / time(answer).
    """

    low: tuple[tuple[Ratio, ...], ...]
    vs_stock: tuple[tuple[Ratio, ...], ...]


class Eager(NamedTuple):
    """Batch intervals, both ends inclusive and both captured sizes; inside, only proven agreement counts."""

    intervals: tuple[tuple[int, int], ...]
    routes: Grid
    speedup: Speedup


class Proof(NamedTuple):
    """What stands behind every letter of one route in one entry.

    ``checks`` is the least of any column, ``launches`` the sum, errors the worst of any column;
    ``requires`` must all be attested before the route is named, ``limits`` are shown only. Both join those of
    all cells that name the route.
    """

    route: str
    checks: int
    launches: int
    worst_error: float
    fallback_error: float
    requires: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One shape, dtypes, q_len and max context: what one review looks at.

    ``batch_size`` are the captured sizes, the columns of ``routes``. ``fallback`` is the kernel that
    every reserved letter stands for. ``fallback_requires`` is what its proofs in these cells assumed; it is
    shown and withholds nothing, since the fallback is what would be called anyway. None: not stated, as in
    older tables and where it is proven nowhere.
    """

    shape: Shape
    dtypes: DTypes
    models: tuple[str, ...]
    fallback: str
    max_context: int
    q_len: int
    batch_size: tuple[int, ...]
    routes: Grid
    speedup: Speedup
    proof: tuple[Proof, ...] = ()
    eager: Eager | None = None
    fallback_requires: tuple[str, ...] | None = None

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The captured grid, then the eager one if there is one."""
        return (self.routes, self.eager.routes) if self.eager else (self.routes,)


class Unsafe(NamedTuple):
    """One accusation, for the reader: a route that failed a proof, how, and how to see it again."""

    route: str
    cell: str
    kind: str
    detail: str
    repro: str


class Quarantine(NamedTuple):
    """A route withdrawn after the table was made. A None field matches everything.

    A batch size also withdraws every eager interval that contains it.
    """

    route: str
    reason: str
    at: str
    shape: Shape | None = None
    dtypes: DTypes | None = None
    q_len: int | None = None
    batch_size: int | None = None

    def of_kind(self, shape: Shape, dtypes: DTypes) -> bool:
        """Whether it is about some call of this shape and these dtypes."""
        return self.shape in (None, shape) and self.dtypes in (None, dtypes)

    def covers(self, q_len: int, low: int, high: int) -> bool:
        """Whether, in its kind, its route is withdrawn at ``q_len`` for some batch of ``low`` to ``high``."""
        return self.q_len in (None, q_len) and (self.batch_size is None or low <= self.batch_size <= high)


@dataclass(frozen=True)
class RoutingTable:
    """One table: one device, one engine.

    ``digest`` is ``sha256:`` and 64 hex digits for a table that was loaded, empty for one that was
    not written yet; it takes no part in comparison, being a function of the rest.
    """

    generated: Generated
    facts: Facts
    policy: Policy
    legend: Mapping[str, str]
    families: Mapping[str, str]
    entries: tuple[Entry, ...]
    unsafe: tuple[Unsafe, ...] = ()
    quarantine: tuple[Quarantine, ...] = ()
    schema: str = SCHEMA
    digest: str = field(default="", compare=False)
