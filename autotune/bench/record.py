"""What a round leaves behind, and the settings it is run with. No torch: the parent reads these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.domain.verdict import FailureKind


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How rounds are run.

    Attributes:
        min_group_ms: calls of one route are grouped until they take at least this long.
        discard_rounds, discard_ms: rounds are thrown away until both are past, at every start of a cell:
            caches, clocks and allocators settle, and group sizes are found. A device that is seen to run at
            the clock at which this process left it a moment ago need not wait for ``discard_ms``.
        max_rounds: rounds of a cell in all, those of earlier starts included.
        chunk: rounds per report; the parent stores and judges each report before the next is run.
        operand_sets: copies of the KV pool that calls rotate through, where the device does not say itself
            (CUDA's clock derives them from cache and memory).
        discard_most_ms: after this long no more than 4 rounds are thrown away: launches of tens of
            milliseconds have settled by then, and found their group size of one.
    """

    min_group_ms: float = 1.0
    discard_rounds: int = 16
    discard_ms: float = 200.0
    max_rounds: int = 128
    chunk: int = 4
    operand_sets: int = 4
    discard_most_ms: float = 1000.0

    def __post_init__(self) -> None:
        if self.min_group_ms <= 0 or min(self.discard_ms, self.discard_most_ms) < 0:
            raise ValueError("min_group_ms must be positive, discard_ms and discard_most_ms not negative")
        if self.discard_rounds < 1:
            raise ValueError("discard_rounds must be at least 1: group sizes are found in them")
        if min(self.max_rounds, self.chunk, self.operand_sets) < 1:
            raise ValueError("max_rounds, chunk and operand_sets must be at least 1")


# CUDA events resolve about 0.5 microseconds (cudaEventElapsedTime), a quarter percent of 0.2 ms. A host timer
# does better, but short calls are at the mercy of interrupts: a group spreads them over several.
MIN_GROUP_MS = {"cpu": 1.0, "cuda": 0.2}
# A report is a commit of a few milliseconds, and a surplus round is one round: on CUDA a round costs about a
# millisecond.
CHUNK = {"cpu": 4, "cuda": 8}


@dataclass(frozen=True, slots=True)
class Finding:
    """What timing found wrong with a route; a proof's finding, met where the route is timed."""

    route: str
    kind: FailureKind
    detail: str


@dataclass(frozen=True, slots=True)
class Round:
    """One paired round: every live route once, on the same lengths.

    Attributes:
        index: 0-based, counted over all starts; with the cell's seed it fixes order, lengths and pages.
        order: routes as they were run.
        run_us: time of one ``run``, the mean of the group: device time on CUDA, the call's on the CPU.
        host_us: host time of one ``run`` call. On the CPU the call is the kernel, so it equals ``run_us``.
        prepare_us: host time of one ``prepare``, the mean of the group.
        calls: calls in the group.
        conditions: readings of the device ``before`` and ``after`` the rounds that were reported together, in
            the last of them (see :class:`autotune.bench.conditions.Conditions`); None in the others.
        dropped: why the round does not count: the device was slowed down by its hardware or by heat. "" if
            it counts.
    """

    index: int
    order: tuple[str, ...]
    run_us: Mapping[str, float]
    host_us: Mapping[str, float]
    prepare_us: Mapping[str, float]
    calls: Mapping[str, int]
    conditions: Mapping[str, Any] | None = None
    dropped: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; what is optional is left out where there is nothing to say."""
        data: dict[str, Any] = {
            "index": self.index,
            "order": list(self.order),
            "run_us": dict(self.run_us),
            "host_us": dict(self.host_us),
            "prepare_us": dict(self.prepare_us),
            "calls": dict(self.calls),
        }
        if self.conditions is not None:
            data["conditions"] = dict(self.conditions)
        if self.dropped:
            data["dropped"] = self.dropped
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Round:
        """Inverse of :meth:`to_dict`; raises ``ValueError`` if a route is missing somewhere."""
        order = tuple(data["order"])
        parts = [dict(data[name]) for name in ("run_us", "host_us", "prepare_us", "calls")]
        routes = set(order)
        for part in parts:
            if part.keys() != routes:
                raise ValueError(f"round {data['index']}: routes {sorted(part)} contradict order {order}")
        run_us, host_us, prepare_us, calls = parts
        return cls(
            data["index"],
            order,
            run_us,
            host_us,
            prepare_us,
            calls,
            conditions=data.get("conditions"),
            dropped=data.get("dropped", ""),
        )
