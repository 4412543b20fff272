"""Every answer of one binding to one table, built beforehand.

A plan never changes. A reload makes another one and puts it in the old one's place with one assignment, so a
look-up sees the old table or the new one, never a mixture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from autotune.router.explanation import Explanation, Why
from autotune.table.letters import NO_SAFE_ROUTE, RESERVED
from autotune.table.model import Entry, Grid, Proof, Speedup

# One column, as a plain tuple, because CPython indexes nothing faster:
# 0 upper ends, 1 kernel names between them, 2 the name without a KV length, 3 and 4 the same as truth values
# of the decode family; 5 upper ends of all rows, 6 whole answers, 7 the whole answer without a KV length.
# Neighbours with one name are one step in 0, which keeps the bisection short. The first end is q_len - 1 and
# its answer None, as is the one past the last end: a KV length outside the proven rows finds None.
# 8 and 9 are 1 and 3 by octave: at k the one answer of all KV lengths past 2^(k-1) up to 2^k, or None where
# they have several, or none. Rows mostly end at powers of two, and finding k costs half of a bisection.
Slot: TypeAlias = (
    "tuple[tuple[int, ...], tuple[str | None, ...], str, tuple[bool | None, ...], bool, "
    "tuple[int, ...], tuple[Explanation | None, ...], Explanation, "
    "tuple[str | None, ...], tuple[bool | None, ...]]"
)
# Ascending, disjoint open intervals: lowest batches inside, highest batches inside, slots.
_Inside: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], tuple[Slot, ...]]"

# Intervals up to this width are written out, one dictionary entry a batch size; wider ones are searched.
_WRITTEN_OUT = 1024

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

MISSES = {
    Why.BAD_INPUT: "batch_size, q_len and max_kv_len must be integers",
    Why.Q_LEN: "no proven cell has this q_len",
    Why.BATCH_SIZE: "neither a captured size nor inside a proven interval",
    Why.KV_LEN: "outside the proven rows",
}


class Plan:
    """Answers by ``q_len`` and batch size.

    Attributes:
        sizes: slots by ``q_len``, then by batch size: captured ones, and those inside a proven interval.
        inside: what was too wide to be written out into ``sizes``, by ``q_len``.
        misses: what answers a call outside the table, by reason.
        always: the one answer of a plan without a table, or None.
        assumes: what proofs of its fallbacks assumed and was not attested, sorted.
    """

    __slots__ = ("always", "assumes", "inside", "misses", "sizes")

    def __init__(
        self,
        sizes: dict[int, dict[int, Slot]],
        inside: Mapping[int, _Inside],
        misses: Mapping[str, Explanation],
        always: Explanation | None = None,
        assumes: tuple[str, ...] = (),
    ) -> None:
        self.sizes = sizes
        self.inside = inside
        self.misses = misses
        self.always = always
        self.assumes = assumes

    @classmethod
    def constant(cls, answer: Explanation) -> Plan:
        """A plan that knows one answer only."""
        return cls({}, {}, dict.fromkeys(MISSES, answer), answer)

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
        withdrawn: frozenset[str] = frozenset(),
        instead: str = "fallback",
    ) -> Plan:
        """Every answer of ``entries``, which prove ``max_context`` and share shape and dtypes.

        Args:
            fallback: the answer of calls outside the table.
            withdrawn: routes that are quarantined somewhere in these entries.
            instead: the caller's own word, for cells whose fallback is one of them.
        """
        sizes: dict[int, dict[int, Slot]] = {}
        spans: dict[int, list[tuple[int, int, Slot]]] = {}
        assumed: set[str] = set()
        for entry in entries:
            assumed.update(entry.fallback_requires or ())
            grid = _Answers(entry, legend, families, max_context, attests, withdrawn, instead)
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
            for low, high, slot in found:
                if high - low < _WRITTEN_OUT:
                    # Captured sizes inside (an interval may span several) keep their own slots.
                    for size in range(low, high + 1):
                        sizes[q_len].setdefault(size, slot)
            if wide := [span for span in found if span[1] - span[0] >= _WRITTEN_OUT]:
                lows, highs, slots = zip(*wide, strict=True)
                inside[q_len] = (lows, highs, slots)
        misses = {why: Explanation(fallback, False, False, why, detail) for why, detail in MISSES.items()}
        return cls(sizes, inside, misses, assumes=tuple(sorted(assumed - attests)))

    def find(self, batch_size: int, q_len: int, max_kv_len: int | None) -> Explanation:
        """The answer for plain integers; one of :attr:`misses` where the table has none."""
        sizes = self.sizes.get(q_len)
        if sizes is None:
            return self.misses[Why.Q_LEN]
        slot = sizes.get(batch_size) or self._slot_inside(batch_size, q_len)
        if slot is None:
            return self.misses[Why.BATCH_SIZE]
        if max_kv_len is None:
            return slot[7]
        return slot[6][bisect_left(slot[5], max_kv_len)] or self.misses[Why.KV_LEN]

    def _slot_inside(self, batch_size: int, q_len: int) -> Slot | None:
        inside = self.inside.get(q_len)
        if inside is None:
            return None
        lows, highs, slots = inside
        index = bisect_left(highs, batch_size)
        return slots[index] if index < len(lows) and lows[index] <= batch_size else None


def _octaves(ends: tuple[int, ...]) -> list[int]:
    """Which step between ``ends`` holds all KV lengths past 2^(k-1) up to 2^k, by k; 0 where no one does."""
    found = []
    for k in range((ends[-1] - 1).bit_length() + 1):
        first, last = bisect_left(ends, (1 << k >> 1) + 1), bisect_left(ends, 1 << k)
        found.append(first if first == last else 0)
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
        withdrawn: frozenset[str],
        instead: str,
    ) -> None:
        self._entry = entry
        self._legend = legend
        self._families = families
        self._max_context = max_context
        self._attests = attests
        self._instead = instead if entry.fallback in withdrawn else None
        self._proofs = {proof.route: proof for proof in entry.proof}

    def slot(self, grid: Grid, speedup: Speedup, column: int) -> Slot:
        """One column: rows cut at the engine's max context, beyond which no call can be right."""
        ends = [self._entry.q_len - 1]
        found: list[Explanation] = []
        for row, low, vs_stock in zip(grid.rows, speedup.low, speedup.vs_stock, strict=True):
            ends.append(min(row.kv_high, self._max_context))
            found.append(self._answer(row.letters[column], low[column], vs_stock[column]))
            if row.kv_high >= self._max_context:
                break
        unknown = self._answer(grid.any[column], None, None)
        # The name decides the family too: a fallback is a context route.
        after = [*(each.answer for each in found[1:]), None]
        steps = [index for index, each in enumerate(found) if each.answer != after[index]]
        cuts = (ends[0], *(ends[index + 1] for index in steps))
        names = (None, *(found[index].answer for index in steps), None)
        decode = (None, *(found[index].use_decode for index in steps), None)
        octaves = _octaves(cuts)
        return (
            cuts,
            names,
            unknown.answer,
            decode,
            unknown.use_decode,
            tuple(ends),
            (None, *found, None),
            unknown,
            tuple(names[step] for step in octaves),
            tuple(decode[step] for step in octaves),
        )

    def _answer(self, letter: str, low: float | None, vs_stock: float | None) -> Explanation:
        meaning, fallback = self._legend[letter], self._entry.fallback
        if letter == NO_SAFE_ROUTE and self._instead is not None:
            detail = f"no safe route: the fallback {fallback!r} is quarantined"
            return Explanation(self._instead, False, False, Why.NO_SAFE_ROUTE, detail, None, None)
        if letter == NO_SAFE_ROUTE:
            return Explanation(fallback, False, False, Why.NO_SAFE_ROUTE, meaning, None, vs_stock)
        if letter in RESERVED:
            why, assumes = _WHY[letter], self._entry.fallback_requires
            return Explanation(fallback, False, False, why, meaning, None, vs_stock, None, assumes)
        proof: Proof = self._proofs[meaning]
        missing = [need for need in proof.requires if need not in self._attests]
        if missing:
            detail = f"{meaning!r} is proven only with {', '.join(missing)}, which was not attested"
            assumes = self._entry.fallback_requires
            return Explanation(fallback, False, False, Why.REQUIRES, detail, None, None, proof, assumes)
        decode = self._families[meaning] == "decode"
        detail = f"proven safe, and faster than {fallback!r}"
        return Explanation(meaning, True, decode, Why.PROVEN_FASTER, detail, low, vs_stock, proof)
