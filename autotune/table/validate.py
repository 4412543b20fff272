"""Which tables are consistent: every relation between letters, rows, intervals and proofs.

Used on both sides: a table is validated before it is written, and again after it is read. Whatever
follows from something else in the table (the ``any`` row, an interval's letters) is derived again and
compared, so an edited and re-signed table cannot say more than its own rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from autotune.domain.fingerprint import HARDWARE_KEYS, SOFTWARE_KEYS, Facts, Scalar
from autotune.domain.margin import TAUS, margin_of
from autotune.domain.route_name import is_route_name
from autotune.table.errors import TableError, show
from autotune.table.letters import RESERVED, ROUTE_LETTER
from autotune.table.model import (
    SCHEMA,
    Eager,
    Entry,
    Grid,
    Policy,
    Proof,
    Ratio,
    RoutingTable,
    Speedup,
    Unsafe,
    derive_any,
)

DECODE, CONTEXT = "decode", "context"

_UTC = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_WORD = re.compile(r"[a-z][a-z0-9_]*")
_INFINITY = float("inf")
_LARGEST = 2**53  # exact in every JSON and YAML reader
_DUST = 1e-9  # of sums and products of decimals
_ROUNDED = 1e-4  # bounds are rounded down to it


def validate(table: RoutingTable) -> None:
    """Pass silently, or raise.

    Raises:
        TableError: the first inconsistency; its place is a path such as ``entries[2].routes["1024"]``.
    """
    if table.schema != SCHEMA:
        raise TableError("schema", f"must be {SCHEMA!r}, not {show(table.schema)}")
    if not _UTC.fullmatch(table.generated.at):
        raise TableError("generated.at", f"must be like 2026-01-31T12:00:00Z, not {show(table.generated.at)}")
    for name in ("by", "study"):
        if not getattr(table.generated, name):
            raise TableError(f"generated.{name}", "must not be empty")
    _facts(table.facts)
    _policy(table)
    _legend(table.legend)
    _families(table)
    for index, entry in enumerate(table.entries):
        _entry(entry, table, f"entries[{index}]")
    _no_overlap(table.entries)
    _unsafe(table.unsafe)
    for index, item in enumerate(table.quarantine):
        if not is_route_name(item.route):
            raise TableError(f"quarantine[{index}].route", f"{show(item.route)} is not a route's name")
        if not _UTC.fullmatch(item.at):
            raise TableError(
                f"quarantine[{index}].at", f"must be like 2026-01-31T12:00:00Z, not {show(item.at)}"
            )


def _facts(facts: Facts) -> None:
    if facts.device not in HARDWARE_KEYS:
        raise TableError("hardware.device", f"{show(facts.device)} is unknown")
    for name, keys, found in (
        ("hardware", HARDWARE_KEYS[facts.device], facts.hardware),
        ("software", SOFTWARE_KEYS[facts.device], facts.software),
    ):
        if set(found) != set(keys):
            odd = sorted(set(found) ^ set(keys))[0]
            raise TableError(f"{name}.{odd}", f"a {facts.device} table needs exactly {', '.join(keys)}")
        _scalars(found, name)
    _scalars(facts.informative, "generated.informative")


def _scalars(found: Mapping[str, Scalar], place: str) -> None:
    for key, value in found.items():
        if value is not None and type(value) not in (str, int, float, bool):
            raise TableError(f"{place}.{key}", f"must be one plain value, not {show(value)}")
        if type(value) is float and not abs(value) < float("inf"):
            raise TableError(f"{place}.{key}", "must be finite")
        if type(value) is int and abs(value) > _LARGEST:
            raise TableError(f"{place}.{key}", "is too large")


def _policy(table: RoutingTable) -> None:
    policy = table.policy
    for name in ("engine", "objective"):
        if not getattr(policy, name):
            raise TableError(f"policy.{name}", "must not be empty")
    if policy.stock is not None and not is_route_name(policy.stock):
        raise TableError("policy.stock", f"{show(policy.stock)} is not a route's name")
    for name, value in (("margin", policy.margin), ("tau", policy.tau)):
        if value is not None and not 0.0 <= value < 1.0:
            raise TableError(f"policy.{name}", f"must be in [0, 1), not {value}")
    if policy.margin < (needed := margin_of(0.0, policy.shift)) - _DUST:
        raise TableError(
            "policy.margin",
            f"{policy.margin:g} is under {needed:g}, {TAUS} x tau {policy.shift:g}: no export writes that; "
            "export the table again",
        )
    if not 0.0 < policy.any_false_claim < 1.0:
        raise TableError("policy.any_false_claim", f"must be in (0, 1), not {policy.any_false_claim}")
    if type(policy.pad_value) is not int or not 0 <= policy.pad_value <= _LARGEST:
        raise TableError("policy.pad_value", f"must be a KV length in tokens, not {show(policy.pad_value)}")
    if policy.layers is not None and not 1 <= policy.layers <= _LARGEST:
        raise TableError("policy.layers", f"must be positive, not {policy.layers}")
    if policy.hidden_prepare is not None and not 0.0 <= policy.hidden_prepare <= 1.0:
        raise TableError("policy.hidden_prepare", f"must be in [0, 1], not {policy.hidden_prepare}")
    if policy.objective != "step" and (policy.layers is not None or policy.hidden_prepare is not None):
        raise TableError("policy", "layers and hidden_prepare belong to the objective step only")


def _legend(legend: Mapping[str, str]) -> None:
    for letter, meaning in RESERVED.items():
        if legend.get(letter) != meaning:
            raise TableError(
                "legend", f"letter {letter!r} must mean {meaning!r}, not {show(legend.get(letter))}"
            )
    names: set[str] = set()
    for letter, meaning in legend.items():
        if letter in RESERVED:
            continue
        if not ROUTE_LETTER.fullmatch(letter):
            raise TableError("legend", f"{show(letter)} cannot be a letter; use one of A-Z a-z 0-9")
        if not is_route_name(meaning):
            raise TableError("legend", f"letter {letter!r}: {show(meaning)} is not a route's name")
        if meaning in names:
            raise TableError("legend", f"route {meaning!r} has two letters")
        names.add(meaning)


def _families(table: RoutingTable) -> None:
    needed = {name for letter, name in table.legend.items() if letter not in RESERVED}
    needed |= {entry.fallback for entry in table.entries}
    for name in sorted(needed - set(table.families)):
        raise TableError("families", f"route {show(name)} is missing")
    for name, family in table.families.items():
        if name not in needed and name != table.policy.stock:
            raise TableError("families", f"route {show(name)} is not named in this table")
        if family not in (DECODE, CONTEXT):
            raise TableError(f"families.{name}", f"must be {DECODE!r} or {CONTEXT!r}, not {show(family)}")


def _entry(entry: Entry, table: RoutingTable, place: str) -> None:
    if not is_route_name(entry.fallback):
        raise TableError(f"{place}.fallback", f"{show(entry.fallback)} is not a route's name")
    if table.families[entry.fallback] != CONTEXT:
        raise TableError(f"{place}.fallback", f"{entry.fallback!r} is not of the context family")
    _needs(entry.fallback_requires or (), f"{place}.fallback_requires")
    if not 1 <= entry.q_len <= entry.max_context <= _LARGEST:
        raise TableError(
            place, f"q_len {entry.q_len} and max_context {entry.max_context} must be positive and ascending"
        )
    sizes = entry.batch_size
    if not sizes or sizes[0] < 1 or sizes[-1] > _LARGEST or not _ascending(sizes):
        raise TableError(f"{place}.batch_size", "must be positive, ascending and not empty")
    if (pad := table.policy.pad_value) > entry.max_context:
        raise TableError(
            f"{place}.max_context", f"{entry.max_context} is under policy.pad_value {pad}: no proof can be"
        )
    _grid(entry.routes, len(sizes), entry, table.legend, f"{place}.routes")
    _speedup(entry.speedup, entry.routes, table.policy, f"{place}.speedup")
    if entry.eager:
        _eager(entry.eager, entry, table, f"{place}.eager")
    named = {table.legend[letter] for letter in _route_letters(entry)}
    for proof in entry.proof:
        _proof(proof, f"{place}.proof.{proof.route}")
    proven = [proof.route for proof in entry.proof]
    for route in sorted(named.symmetric_difference(proven)):
        problem = "has no proof" if route in named else "is proven but named nowhere in this entry"
        raise TableError(f"{place}.proof", f"route {show(route)} {problem}")
    if len(set(proven)) != len(proven):
        raise TableError(f"{place}.proof", "a route appears twice")


def _grid(grid: Grid, width: int, entry: Entry, legend: Mapping[str, str], place: str) -> None:
    ends = [row.kv_high for row in grid.rows]
    if not ends or not _ascending(ends) or ends[0] < entry.q_len or ends[-1] > entry.max_context:
        raise TableError(
            place,
            f"rows must ascend from q_len {entry.q_len} to at most max_context {entry.max_context}, "
            f"not {show(ends)}",
        )
    for name, letters in [*((str(row.kv_high), row.letters) for row in grid.rows), ("any", grid.any)]:
        where = f'{place}["{name}"]'
        if len(letters) != width:
            raise TableError(where, f"{len(letters)} letters for {width} batch sizes")
        for letter in letters:
            if letter not in legend:
                raise TableError(where, f"letter {show(letter)} is not in the legend")
            if letter not in RESERVED and legend[letter] == entry.fallback:
                raise TableError(where, f"letter {letter!r} names the fallback {entry.fallback!r}; write '.'")
    derived = derive_any(grid.rows, entry.max_context)
    if grid.any != derived:
        raise TableError(f'{place}["any"]', f"is {grid.any!r}, but the rows allow {derived!r}")


def _eager(eager: Eager, entry: Entry, table: RoutingTable, place: str) -> None:
    intervals, legend = eager.intervals, table.legend
    if not intervals:
        raise TableError(f"{place}.batch_size", "must not be empty; leave eager out")
    for low, high in intervals:
        if low > high or low not in entry.batch_size or high not in entry.batch_size:
            raise TableError(
                f"{place}.batch_size", f"[{low}, {high}] must ascend between two of the captured batch sizes"
            )
    for left, right in pairwise(intervals):
        if right[0] < left[1] or right == left:
            raise TableError(f"{place}.batch_size", f"{list(left)} and {list(right)} overlap or descend")
    _grid(eager.routes, len(intervals), entry, legend, f"{place}.routes")
    if [row.kv_high for row in eager.routes.rows] != [row.kv_high for row in entry.routes.rows]:
        raise TableError(f"{place}.routes", "rows differ from the entry's own rows")
    _speedup(eager.speedup, eager.routes, table.policy, f"{place}.speedup")
    position = {size: index for index, size in enumerate(entry.batch_size)}
    for row, captured in zip(eager.routes.rows, entry.routes.rows, strict=True):
        for (low, high), letter in zip(intervals, row.letters, strict=True):
            inside = set(captured.letters[position[low] : position[high] + 1])
            if letter not in RESERVED and inside != {letter}:
                raise TableError(
                    f'{place}.routes["{row.kv_high}"]',
                    f"[{low}, {high}] names {legend[letter]!r}, but its captured sizes do not all",
                )


def _speedup(speedup: Speedup, grid: Grid, policy: Policy, place: str) -> None:
    # A claim's bound lies above 1 + margin, and is rounded down.
    least = max(1.0, 1.0 + policy.margin - _ROUNDED - _DUST)
    for name, ratios in (("low", speedup.low), ("vs_stock", speedup.vs_stock)):
        if [len(row) for row in ratios] != [len(row.letters) for row in grid.rows]:
            raise TableError(f"{place}.{name}", "must have one value per row and column of routes")
        for row, values in zip(grid.rows, ratios, strict=True):
            for letter, value in zip(row.letters, values, strict=True):
                if value is not None and not 0.0 < value < _INFINITY:
                    where = f'{place}.{name}["{row.kv_high}"]'
                    raise TableError(where, f"a ratio must be positive, not {value}")
                if name == "low":
                    wrong = value is not None if letter in RESERVED else value is None or value <= least
                    if wrong:  # the place is spelled out only now: these are most of a table's values
                        raise _bound(letter, value, policy.margin, f'{place}.low["{row.kv_high}"]')
                elif value is not None and policy.stock is None:
                    raise TableError(
                        f'{place}.vs_stock["{row.kv_high}"]',
                        f"a ratio {value} to the stock route, but policy.stock is null",
                    )


def _bound(letter: str, value: Ratio, margin: float, place: str) -> TableError:
    if letter in RESERVED:
        return TableError(place, f"a proven bound {value} where no route is named")
    return TableError(
        place,
        f"letter {letter!r} needs a proven bound above {1.0 + margin}, 1 + policy.margin, not {show(value)}",
    )


def _proof(proof: Proof, place: str) -> None:
    for name in ("checks", "launches"):
        if not 1 <= getattr(proof, name) <= _LARGEST:
            raise TableError(f"{place}.{name}", f"must be positive, not {getattr(proof, name)}")
    for name in ("worst_error", "fallback_error"):
        if not 0.0 <= getattr(proof, name) < float("inf"):
            raise TableError(f"{place}.{name}", f"must be zero or positive, not {getattr(proof, name)}")
    _needs(proof.requires, f"{place}.requires")


def _needs(needs: tuple[str, ...], place: str) -> None:
    if list(needs) != sorted(set(needs)) or not all(_WORD.fullmatch(need) for need in needs):
        raise TableError(place, f"must be sorted, distinct words, not {show(needs)}")


def _unsafe(items: tuple[Unsafe, ...]) -> None:
    if not items:
        return
    # Imported only where needed: its dataclasses cost a serving process 3 ms.
    from autotune.domain.verdict import FailureKind

    kinds = {kind.value for kind in FailureKind}
    for index, item in enumerate(items):
        if item.kind not in kinds:
            raise TableError(f"unsafe[{index}].kind", f"{show(item.kind)} is not a failure kind")


def _no_overlap(entries: tuple[Entry, ...]) -> None:
    # One key may be split over entries (their fallbacks differ by batch size), never one batch size.
    claimed: dict[object, list[tuple[int, int, int]]] = {}
    for index, entry in enumerate(entries):
        key = (entry.shape, entry.dtypes, entry.q_len, entry.max_context)
        claimed.setdefault(key, []).extend((low, high, index) for low, high in _spans(entry))
    for spans in claimed.values():
        spans.sort()
        for (_, left_high, left), (low, high, right) in pairwise(spans):
            if low <= left_high:
                raise TableError(
                    f"entries[{right}]",
                    f"batch sizes {low}..{high} are also in entries[{left}] of the same shape, dtypes, "
                    "q_len and max_context",
                )


def _spans(entry: Entry) -> list[tuple[int, int]]:
    """The entry's batch sizes as disjoint ranges, ends inclusive, ascending."""
    spans: list[tuple[int, int]] = []
    intervals = entry.eager.intervals if entry.eager else ()
    for low, high in sorted([*((size, size) for size in entry.batch_size), *intervals]):
        if spans and low <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(high, spans[-1][1]))
        else:
            spans.append((low, high))
    return spans


def _route_letters(entry: Entry) -> set[str]:
    return {
        letter
        for grid in entry.grids
        for row in grid.rows
        for letter in row.letters
        if letter not in RESERVED
    }


def _ascending(values: Iterable[int]) -> bool:
    listed = list(values)
    return all(left < right for left, right in pairwise(listed))
