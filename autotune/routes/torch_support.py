"""Which columns the torch routes take: asked where nothing is run, so without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts

DTYPES = frozenset({"fp32", "bf16"})


def unsupported(column: Column, facts: Facts) -> str | None:
    """Why the torch routes do not take ``column`` on this machine, or None."""
    shape, dtypes = column.shape, column.dtypes
    if facts.device != "cpu":
        return f"runs on the CPU only, not on {facts.device}"
    if dtypes.q not in DTYPES or not dtypes.q == dtypes.kv == dtypes.out:
        return f"takes fp32 or bf16 throughout, not q {dtypes.q}, kv {dtypes.kv}, out {dtypes.out}"
    if shape.soft_cap:
        return f"has no logit soft cap ({shape.soft_cap})"
    if shape.sinks:
        return "has no attention sinks"
    if shape.head_dim_vo != shape.head_dim:
        return f"needs equal QK and VO head dims, not {shape.head_dim} and {shape.head_dim_vo}"
    return None
