"""Exact tensor dtypes of a call, and the precision profiles that name them on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Dtype(str, Enum):
    """Tensor element types by the field's short names."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "e4m3"
    NVFP4 = "nvfp4"


BITS = {
    Dtype.FP64: 64,
    Dtype.FP32: 32,
    Dtype.BF16: 16,
    Dtype.FP16: 16,
    Dtype.E4M3: 8,
    Dtype.NVFP4: 4,
}


@dataclass(frozen=True, slots=True, order=True)
class DTypes:
    """What the engine holds: query, KV cache and output. A route may quantise the query itself."""

    q: str
    kv: str
    out: str

    def __post_init__(self) -> None:
        for name in ("q", "kv", "out"):
            value = getattr(self, name)
            if value not in {dtype.value for dtype in Dtype}:
                raise ValueError(
                    f"{name} dtype {value!r} is unknown; one of {', '.join(dtype.value for dtype in Dtype)}"
                )

    def to_dict(self) -> dict[str, str]:
        """As the table writes it."""
        return {"q": self.q, "kv": self.kv, "out": self.out}

    @classmethod
    def from_dict(cls, data: dict[str, str]) -> DTypes:
        """Strict inverse of :meth:`to_dict`; raises ``ValueError``."""
        if set(data) != {"q", "kv", "out"}:
            raise ValueError(f"dtypes needs exactly the keys q, kv, out, not {sorted(data)}")
        return cls(data["q"], data["kv"], data["out"])


# ``--dtype`` names the KV cache's precision; a checkpoint's name does not (an FP8 or NVFP4 checkpoint
# often keeps a bf16 KV cache).
PROFILES = {
    "fp32": DTypes("fp32", "fp32", "fp32"),
    "bf16": DTypes("bf16", "bf16", "bf16"),
    "fp8": DTypes("bf16", "e4m3", "bf16"),
    "nvfp4": DTypes("bf16", "nvfp4", "bf16"),
}
