"""NVFP4: values as 4-bit e2m1 codes, two a byte, with an e4m3 scale for each 16 of them.

The format is NVIDIA's (cuBLAS documentation, "1D block scaling for FP8 and FP4"): a value is its code's value
times its block's scale, times a scale of the whole tensor, which is not handled here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts

BLOCK = 16
# Magnitudes of the codes 0..7; bit 3 is the sign.
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = LEVELS[-1]
# Tokens whose V scales lie together where they are interleaved.
GROUP = 4


def encode(values: torch.Tensor, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of fp32 ``values`` [..., dim]: uint8 [..., dim / 2], e4m3 [..., dim / 16].

    A block's scale is its largest magnitude / 6, rounded to e4m3; a value takes the nearest level.

    Args:
        exact: every scale is 1, for values that are levels themselves.
    """
    blocks = values.view(*values.shape[:-1], -1, BLOCK)
    if exact:
        scales = torch.ones(blocks.shape[:-1], device=values.device)
    else:
        scales = blocks.abs().amax(dim=-1) / LARGEST
    stored = scales.clamp(max=448.0).to(torch.float8_e4m3fn)
    divisor = stored.to(torch.float32)
    # a block whose scale rounds to zero holds zeros
    relative = blocks.abs() / torch.where(divisor == 0, torch.ones_like(divisor), divisor)[..., None]
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(LEVELS)], device=values.device)
    codes = torch.bucketize(relative, middles).to(torch.uint8) | ((blocks < 0).to(torch.uint8) << 3)
    codes = codes.flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), stored


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values [..., dim] of packed ``codes`` [..., dim / 2] under ``scales`` [..., dim / 16]."""
    signed = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=dtype, device=codes.device)
    wide = codes.to(torch.int64)
    values = signed[torch.stack((wide & 15, wide >> 4), dim=-1).flatten(-2)]
    blocks = values.view(*values.shape[:-1], -1, BLOCK)
    return (blocks * scales.to(dtype)[..., None]).flatten(-2)


def interleaved_place(
    slots: torch.Tensor, blocks: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the V scale of (slot, block) lies in a page of ``count`` blocks a token: its slot and block.

    Within a page and head, scale s of token t is at flat place (t // 4) 4 S + 4 s + t % 4 of S scales a token
    (FlashInfer's ``nvfp4_quantize_paged_kv_cache``, which needs S and the page to be multiples of 4).
    """
    flat = blocks * GROUP + slots % GROUP
    return slots // GROUP * GROUP + flat // count, flat % count


def interleaves_v_scales(column: Column, facts: Facts) -> bool:
    """Whether engines store V's block scales interleaved there: for the trtllm-gen kernels, which exist on
    compute capability 10.0 and 10.3 and take no other order."""
    capability = str(facts.hardware.get("compute_capability") or "")
    return column.dtypes.kv == "nvfp4" and capability.partition(".")[0] == "10"
