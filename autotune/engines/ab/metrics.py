"""The accept length, from the metrics that a server offers in Prometheus' text form."""

from __future__ import annotations

import math
from dataclasses import dataclass

# SGLang has a gauge; vLLM counts drafts and the tokens of them that were accepted.
SGLANG = "sglang:spec_accept_length"
VLLM_DRAFTS = "vllm:spec_decode_num_drafts_total"
VLLM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
# Engines verify at most some tens of tokens a step.
_MOST = 256.0


@dataclass(frozen=True, slots=True)
class Counters:
    """What one reading of the metrics has; None for what is not offered or no number."""

    gauge: float | None = None
    drafts: float | None = None
    accepted: float | None = None


def read_counters(text: str) -> Counters:
    """Sums over labels (ranks, models) of the counters; the mean of the gauge."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line.partition(" ")[0] else line.partition(" ")
        if name not in (SGLANG, VLLM_DRAFTS, VLLM_ACCEPTED):
            continue
        value = (rest.rpartition("}")[2] if "}" in rest else rest).split()
        try:
            number = float(value[0])
        except (ValueError, IndexError):
            continue
        if math.isfinite(number) and number >= 0:
            found.setdefault(name, []).append(number)
    gauge = [value for value in found.get(SGLANG, []) if value > 0]
    drafts, accepted = found.get(VLLM_DRAFTS), found.get(VLLM_ACCEPTED)
    return Counters(
        sum(gauge) / len(gauge) if gauge else None,
        sum(drafts) if drafts else None,
        sum(accepted) if accepted else None,
    )


def accept_length(before: Counters, after: Counters) -> float | None:
    """Tokens a step between two readings, the bonus token included; None where it is not offered.

    A value outside 1..256 cannot be one, and counts as not offered.
    """
    found = after.gauge
    if None not in (before.drafts, after.drafts, before.accepted, after.accepted):
        drafts = (after.drafts or 0.0) - (before.drafts or 0.0)
        accepted = (after.accepted or 0.0) - (before.accepted or 0.0)
        found = 1.0 + accepted / drafts if drafts > 0 else None
    return found if found is not None and 1.0 <= found <= _MOST else None
