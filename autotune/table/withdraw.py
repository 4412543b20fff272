"""New quarantine entries for a table: from what a person names to what a table holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES, DTypes
from autotune.domain.shape import Shape
from autotune.table.errors import TableError
from autotune.table.letters import RESERVED
from autotune.table.model import Entry, Quarantine, RoutingTable
from autotune.table.quarantine import apply_quarantine


@dataclass(frozen=True)
class Withdrawal:
    """What is withdrawn; a None or empty field means all that the table has.

    Attributes:
        heads: per-rank query heads, KV heads and head_dim.
        dtype: a profile's name (``bf16``, ``fp8``, ...).
    """

    route: str
    heads: tuple[int, int, int] | None = None
    dtype: str | None = None
    q_len: tuple[int, ...] = ()
    batch_size: tuple[int, ...] = ()

    def entries(self, table: RoutingTable) -> list[Entry]:
        """The table's entries that it is about.

        Raises:
            TableError: the table does not know the route, or has no such entry; it says what there is.
        """
        known = sorted(
            {name for letter, name in table.legend.items() if letter not in RESERVED}
            | {entry.fallback for entry in table.entries}
        )
        if self.route not in known:
            there = ", ".join(known) or "no route"
            raise TableError("", f"does not name route {self.route!r}; it names {there}")
        found = [entry for entry in table.entries if self._covers(entry.shape, entry.dtypes)]
        if not found:
            raise TableError("", f"has no entry for {self._asked()}; it has {', '.join(_kinds(table))}")
        for name, asked in (("q_len", self.q_len), ("batch_size", self.batch_size)):
            there_are = sorted({value for entry in found for value in _values(entry, name)})
            for value in asked:
                if not _inside(value, there_are):
                    raise TableError(
                        "", f"has no {name} {value} in these entries; it has {_listed(there_are)}"
                    )
        # Each may be there, and not together.
        for q_len, size in product(self.q_len, self.batch_size):
            sizes = sorted({v for e in found if e.q_len == q_len for v in _values(e, "batch_size")})
            if not _inside(size, sizes):
                raise TableError(
                    "",
                    f"has no batch_size {size} with q_len {q_len} in these entries; it has {_listed(sizes)}",
                )
        return [entry for entry in found if not self.q_len or entry.q_len in self.q_len]

    def items(self, table: RoutingTable, reason: str, at: str) -> list[Quarantine]:
        """The entries of a quarantine list that say it; raises ``TableError`` as :meth:`entries`."""
        found = self.entries(table)
        kinds: list[tuple[Shape | None, DTypes | None]] = [(None, None)]
        if self.heads is not None or self.dtype is not None:
            kinds = list(dict.fromkeys((entry.shape, entry.dtypes) for entry in found))
        return [
            Quarantine(self.route, reason, at, shape, dtypes, q_len, size)
            for (shape, dtypes), q_len, size in product(
                kinds, self.q_len or (None,), self.batch_size or (None,)
            )
        ]

    def columns(self, table: RoutingTable) -> Iterator[Column]:
        """The columns that a database notes it for: captured sizes, and samples inside an interval.

        An export makes one item of each, which again withdraws that size and every interval around it.

        Raises:
            TableError: as :meth:`entries`.
        """
        for entry in self.entries(table):
            for size, interval in self._sizes(entry):
                where = (entry.shape, entry.dtypes, entry.q_len, size, entry.max_context)
                yield Column(*where, interval, table.policy.pad_value)

    def _sizes(self, entry: Entry) -> list[tuple[int, tuple[int, int] | None]]:
        if not self.batch_size:
            return [(size, None) for size in entry.batch_size]
        sizes: list[tuple[int, tuple[int, int] | None]] = []
        for size in self.batch_size:
            if size in entry.batch_size:
                sizes.append((size, None))
                continue
            for low, high in entry.eager.intervals if entry.eager else ():
                if low < size < high:
                    sizes.append((size, (low, high)))
        return sizes

    def _covers(self, shape: Shape, dtypes: DTypes) -> bool:
        heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
        if self.heads is not None and heads != self.heads:
            return False
        # By the KV cache's dtype: a route may be given another query dtype than the profile's.
        return self.dtype is None or dtypes.kv == PROFILES[self.dtype].kv

    def _asked(self) -> str:
        heads = "/".join(map(str, self.heads)) if self.heads else "any heads"
        return f"{heads} {self.dtype or 'any dtype'}"


def withdraw(table: RoutingTable, items: list[Quarantine]) -> RoutingTable:
    """The table with these items added and its letters rewritten.

    An item that says what an older one said takes its place: the newer reason stays.
    """
    added = {item[:1] + item[3:] for item in items}
    kept = [item for item in table.quarantine if item[:1] + item[3:] not in added]
    return apply_quarantine(replace(table, quarantine=(*kept, *items)))


def _inside(value: int, spans: list[tuple[int, int]]) -> bool:
    return any(low <= value <= high for low, high in spans)


def _listed(spans: list[tuple[int, int]]) -> str:
    return ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in spans)


def _values(entry: Entry, name: str) -> list[tuple[int, int]]:
    if name == "q_len":
        return [(entry.q_len, entry.q_len)]
    inside = [(low + 1, high - 1) for low, high in entry.eager.intervals] if entry.eager else []
    return [*((size, size) for size in entry.batch_size), *(span for span in inside if span[0] <= span[1])]


def _kinds(table: RoutingTable) -> list[str]:
    return sorted(
        {
            f"{entry.shape.num_qo_heads}/{entry.shape.num_kv_heads}/{entry.shape.head_dim} {entry.dtypes.kv}"
            for entry in table.entries
        }
    )
