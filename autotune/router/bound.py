"""The hot path: one attention layer kind, bound to its proven cells.

Every possible answer is built beforehand; a look-up is two dictionary hits and a bisection, takes no
lock, allocates nothing and cannot raise. Containment, never nearest: a batch size is a captured one or
lies strictly inside a proven interval, a KV length lies inside a proven row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from numbers import Integral

from autotune.router.explanation import Explanation, Why
from autotune.router.log import logger
from autotune.table.letters import RESERVED
from autotune.table.model import Entry, Grid, Proof, Speedup

# (upper ends, answers, answer without a KV length). The first end is q_len - 1 and its answer None, as is
# the one past the last end: a KV length outside the proven rows finds None.
_Slot = tuple["tuple[int, ...]", "tuple[Explanation | None, ...]", Explanation]
# Ascending, disjoint open intervals: lowest batches inside, highest batches inside, slots.
_Inside = tuple["tuple[int, ...]", "tuple[int, ...]", "tuple[_Slot, ...]"]

_TRUTH: type = bool
_WHY = dict(
    zip(
        RESERVED,
        (
            *(Why.NOT_FASTER, Why.CANDIDATE_UNSAFE, Why.UNPROVEN),
            *(Why.TOO_LARGE, Why.NO_SAFE_ROUTE, Why.QUARANTINED),
        ),
        strict=True,
    )
)

_MISSES = {
    Why.BAD_INPUT: "batch_size, q_len and max_kv_len must be integers",
    Why.Q_LEN: "no proven cell has this q_len",
    Why.BATCH_SIZE: "neither a captured size nor inside a proven interval",
    Why.KV_LEN: "outside the proven rows",
}


class MissLog:
    """One log line per kind of miss and router, however many calls miss."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, found: Explanation) -> None:
        if found.why not in self._seen:
            self._seen.add(found.why)
            # A logging handler or filter is foreign code; serving must not die of it.
            try:
                logger().warning("fallback, %s: %s (further ones are not logged)", found.why, found.detail)
            except Exception:
                return


class Bound:
    """Answers for one shape, dtypes and max context. Made by ``Router.bind``."""

    __slots__ = ("_inside", "_log", "_misses", "_sizes")

    def __init__(
        self,
        sizes: Mapping[int, Mapping[int, _Slot]],
        inside: Mapping[int, _Inside],
        misses: Mapping[str, Explanation],
        log: MissLog | None,
    ) -> None:
        self._sizes = sizes
        self._inside = inside
        self._misses = misses
        self._log = log

    @classmethod
    def always(cls, answer: Explanation) -> Bound:
        """A bound that knows one answer only."""
        return cls({}, {}, dict.fromkeys(_MISSES, answer), None)

    @classmethod
    def of(
        cls,
        entries: Iterable[Entry],
        *,
        legend: Mapping[str, str],
        families: Mapping[str, str],
        max_context: int,
        attests: frozenset[str],
        fallback: str,
        log: MissLog,
    ) -> Bound:
        """Prebuild every answer of ``entries``, which prove ``max_context`` and share shape and dtypes."""
        sizes: dict[int, dict[int, _Slot]] = {}
        spans: dict[int, list[tuple[int, int, _Slot]]] = {}
        for entry in entries:
            grid = _Answers(entry, legend, families, max_context, attests)
            columns = sizes.setdefault(entry.q_len, {})
            for index, size in enumerate(entry.batch_size):
                columns[size] = grid.slot(entry.routes, entry.speedup, index)
            for index, (low, high) in enumerate(entry.eager.intervals if entry.eager else ()):
                # The ends are captured sizes and have their own slots.
                if entry.eager and high - low > 1:
                    slot = grid.slot(entry.eager.routes, entry.eager.speedup, index)
                    spans.setdefault(entry.q_len, []).append((low + 1, high - 1, slot))
        inside: dict[int, _Inside] = {}
        for q_len, found in spans.items():
            found.sort(key=lambda span: span[0])
            lows, highs, slots = zip(*found, strict=True)
            inside[q_len] = (lows, highs, slots)
        misses = {why: Explanation(fallback, False, False, why, detail) for why, detail in _MISSES.items()}
        return cls(sizes, inside, misses, log)

    def route(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> str:
        """The kernel to call: a proven route, or the fallback. Never raises.

        Args:
            batch_size: requests in the call (under CUDA graphs: the captured, padded size).
            q_len: query tokens per request.
            max_kv_len: the longest request's KV tokens, new ones included; None if it is not known on the
                host, as under graph capture. Then a route is named only if every row names it.
        """
        return self._find(batch_size, q_len, max_kv_len).answer

    def use_decode(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> bool:
        """Whether a route of the decode family is proven for this call. Never raises."""
        return self._find(batch_size, q_len, max_kv_len).use_decode

    def proven(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> str | None:
        """The proven route, or None where :meth:`route` answers the fallback. Never raises."""
        found = self._find(batch_size, q_len, max_kv_len)
        return found.answer if found.proven else None

    def explain(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> Explanation:
        """The answer with its reason and proof, from the same look-up as :meth:`route`. Never raises."""
        found = self._find(batch_size, q_len, max_kv_len)
        if self._log is not None and found is self._misses.get(found.why):
            call = f"batch_size {_short(batch_size)}, q_len {_short(q_len)}, max_kv_len {_short(max_kv_len)}"
            return found._replace(detail=f"{call}: {found.detail}")
        return found

    def _find(self, batch_size: int, q_len: int, max_kv_len: int | None) -> Explanation:
        # ``type() is``: True == 1 and 1.0 == 1 would hit a dictionary; foreign numbers take the slow way.
        if (
            type(batch_size) is not int
            or type(q_len) is not int
            or (max_kv_len is not None and type(max_kv_len) is not int)
        ):
            return self._find_foreign(batch_size, q_len, max_kv_len)
        sizes = self._sizes.get(q_len)
        if sizes is None:
            return self._miss(Why.Q_LEN)
        slot = sizes.get(batch_size)
        if slot is None:
            slot = self._slot_inside(batch_size, q_len)
            if slot is None:
                return self._miss(Why.BATCH_SIZE)
        if max_kv_len is None:
            return slot[2]
        return slot[1][bisect_left(slot[0], max_kv_len)] or self._miss(Why.KV_LEN)

    def _slot_inside(self, batch_size: int, q_len: int) -> _Slot | None:
        inside = self._inside.get(q_len)
        if inside is None:
            return None
        lows, highs, slots = inside
        index = bisect_left(highs, batch_size)
        return slots[index] if index < len(lows) and lows[index] <= batch_size else None

    def _find_foreign(self, batch_size: object, q_len: object, max_kv_len: object) -> Explanation:
        size, tokens, longest = as_integer(batch_size), as_integer(q_len), as_integer(max_kv_len)
        if size is None or tokens is None or (longest is None and max_kv_len is not None):
            return self._miss(Why.BAD_INPUT)
        return self._find(size, tokens, longest)

    def _miss(self, why: str) -> Explanation:
        found = self._misses[why]
        if self._log is not None:
            self._log(found)
        return found


class _Answers:
    """Prebuilt answers of one entry."""

    def __init__(
        self,
        entry: Entry,
        legend: Mapping[str, str],
        families: Mapping[str, str],
        max_context: int,
        attests: frozenset[str],
    ) -> None:
        self._entry = entry
        self._legend = legend
        self._families = families
        self._max_context = max_context
        self._attests = attests
        self._proofs = {proof.route: proof for proof in entry.proof}

    def slot(self, grid: Grid, speedup: Speedup, column: int) -> _Slot:
        """One column: rows cut at the engine's max context, beyond which no call can be right."""
        ends = [self._entry.q_len - 1]
        found: list[Explanation | None] = [None]
        for row, low, vs_stock in zip(grid.rows, speedup.low, speedup.vs_stock, strict=True):
            ends.append(min(row.kv_high, self._max_context))
            found.append(self._answer(row.letters[column], low[column], vs_stock[column]))
            if row.kv_high >= self._max_context:
                break
        return tuple(ends), (*found, None), self._answer(grid.any[column], None, None)

    def _answer(self, letter: str, low: float | None, vs_stock: float | None) -> Explanation:
        meaning, fallback = self._legend[letter], self._entry.fallback
        if letter in RESERVED:
            return Explanation(fallback, False, False, _WHY[letter], meaning, None, vs_stock)
        proof: Proof = self._proofs[meaning]
        missing = [need for need in proof.requires if need not in self._attests]
        if missing:
            detail = f"{meaning!r} is proven only with {', '.join(missing)}, which was not attested"
            return Explanation(fallback, False, False, Why.REQUIRES, detail, None, None, proof)
        decode = self._families[meaning] == "decode"
        detail = f"proven safe, and faster than {fallback!r}"
        return Explanation(meaning, True, decode, Why.PROVEN_FASTER, detail, low, vs_stock, proof)


def as_integer(value: object) -> int | None:
    """``value`` if its type is an integer's, Python's or NumPy's, and not a truth value; else None.

    A tensor is not asked: reading one would synchronise with the device and break a graph capture.
    """
    if type(value) is int:
        return value
    try:
        return int(value) if isinstance(value, Integral) and not isinstance(value, _TRUTH) else None
    except Exception:  # a foreign class may do anything
        return None


def _short(value: object) -> str:
    # repr of foreign objects may raise, and a huge integer's is refused by CPython.
    try:
        return repr(value)[:24]
    except Exception:
        return type(value).__name__
