"""Rules of what was proven: this kernel, on this machine, inside this box, the same on all ranks."""

from __future__ import annotations

from autotune.domain.fingerprint import mismatches
from autotune.routes.contract.call import Call, Rule


def _supported(call: Call) -> str | None:
    route, facts = call.route, call.context.facts
    if route is None or isinstance(route, str) or facts is None:
        return None
    reason = route.supports(call.capacity.column, facts)
    return None if reason is None else f"{route.name} does not take {call.capacity.column}: {reason}"


def _fingerprint(call: Call) -> str | None:
    table, here = call.context.table_facts, call.context.facts
    if table is None:
        return None
    if here is None:
        return "the facts of this machine are None; a table opens only where they are known"
    found = mismatches(table, here)
    return f"{found[0]} ({len(found)} facts differ in all)" if found else None


def _ranks(call: Call) -> str | None:
    digests = call.context.digests
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            return (
                f"rank {rank} holds the table {digest}, rank 0 {digests[0]}; ranks would call other kernels"
            )
    return None


def _proven_box(call: Call) -> str | None:
    proven, batch = call.context.proven, call.step.batch_size
    if proven is None:
        return None
    inside = any(low < batch < high for low, high in proven.intervals)
    if batch not in proven.batch_sizes and not inside:
        return f"batch_size is {batch}; proven are {proven.batch_sizes} and inside of {proven.intervals}"
    longest = call.step.max_seq_len if call.kv_lens is None else max(call.kv_lens, default=0)
    if longest > proven.max_kv_len:
        return f"the longest request may have {longest} tokens; proven are {proven.max_kv_len}"
    return None


SUPPORTED = Rule(
    "supported",
    _supported,
    "a kernel that was never built, or never tested, for this shape runs",
    ("flashinfer #3343", "aiter #4365"),
)
FINGERPRINT = Rule(
    "fingerprint",
    _fingerprint,
    "another driver, build or device than the proven one",
    ("onnxruntime #29550", "vllm #54225"),
)
RANKS = Rule("ranks", _ranks, "ranks choose other kernels and wait for each other", ("flashinfer #3186",))
PROVEN_BOX = Rule("proven_box", _proven_box, "an answer is stretched past its proof", ("flashinfer #3216",))
