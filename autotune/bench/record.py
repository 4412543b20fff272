"""What a round leaves behind, and the settings it is run with. No torch: the parent reads these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How rounds are run.

    Attributes:
        min_group_ms: calls of one route are grouped until they take at least this long.
        discard_rounds, discard_ms: rounds are thrown away until both are past, after every start of a
            child: caches, clocks and allocators settle, and group sizes are found.
        max_rounds: rounds of a cell in all, those of earlier starts included.
        chunk: rounds per report; the parent stores and judges each report before the next is run.
        operand_sets: copies of the KV pool that calls rotate through.
    """

    min_group_ms: float = 1.0
    discard_rounds: int = 16
    discard_ms: float = 200.0
    max_rounds: int = 128
    chunk: int = 4
    operand_sets: int = 4

    def __post_init__(self) -> None:
        if self.min_group_ms <= 0 or self.discard_ms < 0:
            raise ValueError("min_group_ms must be positive and discard_ms not negative")
        if self.discard_rounds < 1:
            raise ValueError("discard_rounds must be at least 1: group sizes are found in them")
        if min(self.max_rounds, self.chunk, self.operand_sets) < 1:
            raise ValueError("max_rounds, chunk and operand_sets must be at least 1")


# CUDA events resolve about 0.5 microseconds (cudaEventElapsedTime), a quarter percent of 0.2 ms. A host timer
# does better, but short calls are at the mercy of interrupts: a group spreads them over several.
MIN_GROUP_MS = {"cpu": 1.0, "cuda": 0.2}


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
    """

    index: int
    order: tuple[str, ...]
    run_us: Mapping[str, float]
    host_us: Mapping[str, float]
    prepare_us: Mapping[str, float]
    calls: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "index": self.index,
            "order": list(self.order),
            "run_us": dict(self.run_us),
            "host_us": dict(self.host_us),
            "prepare_us": dict(self.prepare_us),
            "calls": dict(self.calls),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Round:
        """Inverse of :meth:`to_dict`; raises ``ValueError`` if a route is missing somewhere."""
        order = tuple(data["order"])
        parts = [dict(data[name]) for name in ("run_us", "host_us", "prepare_us", "calls")]
        for part in parts:
            if set(part) != set(order):
                raise ValueError(f"round {data['index']}: routes {sorted(part)} contradict order {order}")
        return cls(data["index"], order, *parts)
