"""The per-rank shape of one attention layer kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any


class KvLayout(str, Enum):
    """How an engine lays out one layer's paged KV pool.

    ``fused`` is one allocation whose first half is K and second half V (SGLang); ``interleaved`` keeps
    K and V of a page together (FlashInfer's 5-D cache); ``packed`` keeps K and V of a token's head in one row
    of 2 x head_dim (vLLM 0.33, a 4-D cache); ``separate`` is two allocations. ``nhd`` orders a page as
    [page_size, heads, row], ``hnd`` as [heads, page_size, row]. Pages follow each other without a gap.
    """

    FUSED_NHD = "fused-nhd"
    FUSED_HND = "fused-hnd"
    INTERLEAVED_NHD = "interleaved-nhd"
    INTERLEAVED_HND = "interleaved-hnd"
    SEPARATE_NHD = "separate-nhd"
    SEPARATE_HND = "separate-hnd"
    PACKED_NHD = "packed-nhd"
    PACKED_HND = "packed-hnd"

    @property
    def packed(self) -> bool:
        """Whether one row holds K and then V of a token's head."""
        return self in (KvLayout.PACKED_NHD, KvLayout.PACKED_HND)


class Mask(str, Enum):
    """Which new tokens see which: ``causal`` aligns the queries with the end of the KV."""

    CAUSAL = "causal"


def is_integer(value: object) -> bool:
    """Whether ``value`` is an integer and no truth value: ``False`` equals 0 and means something else."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Heads and layout that one rank sees; what a kernel is compiled or chosen for.

    ``window_left`` counts the earlier tokens a query may see (-1: all). ``soft_cap`` 0.0 means none.

    Raises:
        ValueError: a count is not positive, the query heads are not a multiple of the KV heads, or a
            field has no meaning.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    head_dim_vo: int = 0  # 0 in the constructor means: as head_dim
    kv_layout: str = KvLayout.FUSED_NHD.value
    window_left: int = -1
    sinks: bool = False
    soft_cap: float = 0.0
    mask: str = Mask.CAUSAL.value

    def __post_init__(self) -> None:
        if is_integer(self.head_dim_vo) and self.head_dim_vo == 0:
            object.__setattr__(self, "head_dim_vo", self.head_dim)
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "head_dim_vo"):
            value = getattr(self, name)
            if not is_integer(value) or value <= 0:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads {self.num_qo_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not is_integer(self.window_left) or self.window_left < -1:
            raise ValueError(f"window_left must be -1 (none) or a token count, not {self.window_left!r}")
        if isinstance(self.soft_cap, bool) or not self.soft_cap >= 0.0:
            raise ValueError(f"soft_cap must be 0.0 (none) or positive, not {self.soft_cap!r}")
        object.__setattr__(self, "soft_cap", float(self.soft_cap))
        if not isinstance(self.sinks, bool):
            raise ValueError(f"sinks must be true or false, not {self.sinks!r}")
        KvLayout(self.kv_layout)
        Mask(self.mask)

    @property
    def group(self) -> int:
        """Query heads per KV head (the GQA ratio)."""
        return self.num_qo_heads // self.num_kv_heads

    def to_dict(self) -> dict[str, Any]:
        """Plain values in field order, as the table writes them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Shape:
        """Strict inverse of :meth:`to_dict`; unknown or missing keys raise ``ValueError``."""
        known = {field.name for field in fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(f"unknown shape key {sorted(unknown)[0]!r}")
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(str(error)) from error
