"""One call as the rules see it, and one rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from autotune.routes.base import Capacity, Route, Step
    from autotune.routes.contract.context import Context
    from autotune.routes.contract.kernel import Kernel

# torch dtypes by their printed names; two nvfp4 values share a byte.
TORCH_NAMES = {
    "fp64": ("torch.float64",),
    "fp32": ("torch.float32",),
    "bf16": ("torch.bfloat16",),
    "fp16": ("torch.float16",),
    "e4m3": ("torch.float8_e4m3fn",),
    "nvfp4": ("torch.uint8", "torch.float4_e2m1fn_x2"),
}
SCALED = frozenset({"e4m3", "nvfp4"})
# Elements along head_dim that share a scale.
NVFP4_BLOCK = 16


class Level(str, Enum):
    """``full`` may read tensors; ``static`` must not."""

    FULL = "full"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class Call:
    """What the rules look at.

    Attributes:
        kv_lens: the total lengths on the host, or None where the level forbids reading them.
        out: where the result goes; None if the caller has none yet.
        pad_value: ``seq_lens`` of a padded row; None if the call has no padded rows.
        max_offset: largest element offset into the pool that is proven; None for no limit.
        cached_lens: tokens that each request held before this step, on the host; None: not said.
        q_lens: query tokens of each request, on the host; None: ``step.q_len`` for all.
    """

    capacity: Capacity
    step: Step
    level: Level
    kv_lens: tuple[int, ...] | None
    out: torch.Tensor | None
    pad_value: int | None
    max_offset: int | None
    route: Route | str | None
    kernel: Kernel
    context: Context
    cached_lens: tuple[int, ...] | None = None
    q_lens: tuple[int, ...] | None = None

    @property
    def full(self) -> bool:
        """Tensors may be read."""
        return self.level is Level.FULL


@dataclass(frozen=True, slots=True)
class Rule:
    """One way that calls went wrong.

    Attributes:
        check: the message of a broken rule, or None.
        why: what happens without it, in a few words.
        seen: where it happened, as public issues.
        full: says something at level ``full`` only.
    """

    name: str
    check: Callable[[Call], str | None]
    why: str
    seen: tuple[str, ...] = ()
    full: bool = False
