"""What differs between two tables: facts and policy, routes, and letters by what they mean. Pure.

Entries are matched by all that identifies them. Those left over are matched once more without page size, KV
layout and max context, where that leaves no doubt: so tables of two engines can be compared, and what was
passed over is among the differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from autotune.domain.dtypes import DTypes
from autotune.domain.shape import Shape
from autotune.table.letters import RESERVED
from autotune.table.model import Entry, Grid, Ratio, RoutingTable, Speedup

Batch: TypeAlias = "int | tuple[int, int]"
_Place: TypeAlias = "tuple[Shape, DTypes, int, int, Batch]"


@dataclass(frozen=True, slots=True)
class Change:
    """One place whose answer changed; None means that a table has no such place.

    ``batch`` is a captured size or an eager interval, ``kv_low`` and ``kv_high`` are inclusive, and both
    are None for the ``any`` row. ``before`` and ``after`` are route names or a reserved letter's meaning.
    ``low`` and ``vs_stock`` are the ratios of either table there: the proven lower bound against its
    fallback (None where no route is named), and the median against what its engine calls by itself.
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
    low: tuple[Ratio, Ratio] = (None, None)
    vs_stock: tuple[Ratio, Ratio] = (None, None)


class Difference(NamedTuple):
    """Something other than a letter that differs; None where one table lacks it.

    ``entries`` is the number of entries in which it does, 1 for what a table has once.
    """

    what: str
    before: Any
    after: Any
    entries: int = 1


@dataclass(frozen=True, slots=True)
class TableDiff:
    """How a second table differs from a first.

    Attributes:
        differences: of facts, policy, routes, entries, accusations and quarantine, in this order.
        changes: letters that changed, the ``any`` rows' too, in the order of the first table.
        places: cells that both tables have, the ``any`` rows left out.
    """

    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]
    places: int

    @property
    def same(self) -> bool:
        """Whether a router would answer alike from both, on the machine of each."""
        return not self.differences and not self.changes


def diff_tables(old: RoutingTable, new: RoutingTable) -> tuple[Change, ...]:
    """Every change of a letter, in the order of ``old`` and then of what only ``new`` has.

    Rows are compared over the edges of both tables, so a row that was only split is not a change.
    """
    return _changes(old, new)[0]


def compare(old: RoutingTable, new: RoutingTable) -> TableDiff:
    """Everything that differs and matters to a router or its reviewer; not times, ratios or counts alone."""
    paired, aligned = _align(old, new)
    changes, places = _changes(old, aligned)
    return TableDiff((*_differences(old, new), *paired, *_between_entries(old, aligned)), changes, places)


def _changes(old: RoutingTable, new: RoutingTable) -> tuple[tuple[Change, ...], int]:
    before, after = dict(_columns(old)), dict(_columns(new))
    changes: list[Change] = []
    places = 0
    for place in {**before, **after}:
        was, now = before.get(place, _NOWHERE), after.get(place, _NOWHERE)
        if was.any != now.any:
            changes.append(Change(*place, None, None, was.any, now.any))
        low = place[2]
        for high in sorted({row.kv_high for row in (*was.rows, *now.rows)}):
            left, right = was.at(high), now.at(high)
            places += left.meaning is not None and right.meaning is not None
            if left.meaning != right.meaning:
                changes.append(
                    Change(
                        *place,
                        *(low, high, left.meaning, right.meaning),
                        (left.low, right.low),
                        (left.vs_stock, right.vs_stock),
                    )
                )
            low = high + 1
    return tuple(changes), places


class _Answer(NamedTuple):
    kv_high: int
    meaning: str | None
    low: Ratio = None
    vs_stock: Ratio = None


class _Column(NamedTuple):
    """One column: its rows, ascending, and its ``any``."""

    rows: tuple[_Answer, ...] = ()
    any: str | None = None

    def at(self, kv_len: int) -> _Answer:
        return next((row for row in self.rows if kv_len <= row.kv_high), _Answer(kv_len, None))


_NOWHERE = _Column()


def _columns(table: RoutingTable) -> Iterator[tuple[_Place, _Column]]:
    for entry in table.entries:
        grids: list[tuple[tuple[Batch, ...], Grid, Speedup]] = [
            (entry.batch_size, entry.routes, entry.speedup)
        ]
        if entry.eager:
            grids.append((entry.eager.intervals, entry.eager.routes, entry.eager.speedup))
        for batches, grid, speedup in grids:
            for index, batch in enumerate(batches):
                rows = tuple(
                    _Answer(row.kv_high, table.legend[row.letters[index]], low[index], stock[index])
                    for row, low, stock in zip(grid.rows, speedup.low, speedup.vs_stock, strict=True)
                )
                place = (entry.shape, entry.dtypes, entry.q_len, entry.max_context, batch)
                yield place, _Column(rows, table.legend[grid.any[index]])


def _differences(old: RoutingTable, new: RoutingTable) -> Iterator[Difference]:
    if old.facts.device != new.facts.device:
        yield Difference("hardware.device", old.facts.device, new.facts.device)
    yield from _keys("hardware.", old.facts.hardware, new.facts.hardware)
    yield from _keys("software.", old.facts.software, new.facts.software)
    yield from _keys("policy.", old.policy._asdict(), new.policy._asdict())
    yield from _keys("route ", _named(old), _named(new))
    for what, left, right in (
        ("unsafe", _accusations(old), _accusations(new)),
        ("quarantine", _withdrawn(old), _withdrawn(new)),
    ):
        yield from (Difference(what, item, None) for item in left if item not in right)
        yield from (Difference(what, None, item) for item in right if item not in left)


def _keys(prefix: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for key in {**old, **new}:
        left, right = old.get(key), new.get(key)
        if left != right or type(left) is not type(right):
            yield Difference(f"{prefix}{key}", left, right)


def _named(table: RoutingTable) -> dict[str, str]:
    """Routes that a letter or a fallback names, with their family."""
    named = {name for letter, name in table.legend.items() if letter not in RESERVED}
    named |= {entry.fallback for entry in table.entries}
    return {name: family for name, family in table.families.items() if name in named}


def _accusations(table: RoutingTable) -> list[str]:
    return [f"{item.route} {item.kind} in {item.cell}" for item in table.unsafe]


def _withdrawn(table: RoutingTable) -> list[str]:
    found = []
    for item in table.quarantine:
        shape, dtypes = item.shape, item.dtypes
        where = [] if shape is None else [f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim}"]
        where += [] if dtypes is None else [f"{dtypes.q}/{dtypes.kv}/{dtypes.out}"]
        where += [] if item.q_len is None else [f"q_len {item.q_len}"]
        where += [] if item.batch_size is None else [f"batch {item.batch_size}"]
        found.append(f"{item.route} {' '.join(where) or 'everywhere'}: {item.reason}")
    return found


_Key: TypeAlias = "tuple[Shape, DTypes, int, int]"
# What two engines that serve the same model do differently.
_LAYOUT = ("page_size", "kv_layout")


def _key(entry: Entry) -> _Key:
    return entry.shape, entry.dtypes, entry.q_len, entry.max_context


def _loose(key: _Key) -> tuple[object, ...]:
    shape = {name: value for name, value in key[0].to_dict().items() if name not in _LAYOUT}
    return (*shape.items(), key[1], key[2])


def _align(old: RoutingTable, new: RoutingTable) -> tuple[list[Difference], RoutingTable]:
    """``new`` with the keys of the entries of ``old`` that can only be meant, and what they differ in."""
    left = dict.fromkeys(_key(entry) for entry in old.entries)
    right = dict.fromkeys(_key(entry) for entry in new.entries)
    mine = _unique(key for key in left if key not in right)
    theirs = _unique(key for key in right if key not in left)
    meant = {theirs[loose]: key for loose, key in mine.items() if loose in theirs}
    found: Counter[Difference] = Counter()
    entries = []
    for entry in new.entries:
        key = meant.get(_key(entry))
        if key is None:
            entries.append(entry)
            continue
        shape, _, _, max_context = key
        values = [(name, getattr(shape, name), getattr(entry.shape, name)) for name in _LAYOUT]
        for name, was, now in (*values, ("max_context", max_context, entry.max_context)):
            if was != now:
                found[Difference(name, was, now)] += 1
        entries.append(replace(entry, shape=shape, max_context=max_context))
    counted = [each._replace(entries=count) for each, count in found.items()]
    return counted, replace(new, entries=tuple(entries))


def _unique(keys: Iterable[_Key]) -> dict[tuple[object, ...], _Key]:
    found: dict[tuple[object, ...], list[_Key]] = {}
    for key in keys:
        found.setdefault(_loose(key), []).append(key)
    return {loose: same[0] for loose, same in found.items() if len(same) == 1}


def _between_entries(old: RoutingTable, new: RoutingTable) -> Iterator[Difference]:
    """Fallbacks and conditions of routes, over the entries that both have: each difference once."""
    found: Counter[Difference] = Counter()
    theirs: dict[_Key, list[Entry]] = {}
    for entry in new.entries:
        theirs.setdefault(_key(entry), []).append(entry)
    for entry in old.entries:
        for other in theirs.get(_key(entry), ()):
            # an entry split by fallback is compared with the part that shares its batch sizes
            if not set(entry.batch_size) & set(other.batch_size):
                continue
            if entry.fallback != other.fallback:
                found[Difference("fallback", entry.fallback, other.fallback)] += 1
            elif entry.fallback_requires != other.fallback_requires and None not in (
                entry.fallback_requires,
                other.fallback_requires,
            ):
                what = f"requires of fallback {entry.fallback}"
                found[Difference(what, entry.fallback_requires, other.fallback_requires)] += 1
            proofs = {proof.route: proof for proof in entry.proof}
            for proof in other.proof:
                if (was := proofs.get(proof.route)) is None:
                    continue
                for name in ("requires", "limits"):
                    values = getattr(was, name), getattr(proof, name)
                    if values[0] != values[1]:
                        found[Difference(f"{name} of {proof.route}", *values)] += 1
    for each, count in found.items():
        yield each._replace(entries=count)
