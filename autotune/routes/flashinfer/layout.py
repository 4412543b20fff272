"""The engine's KV pool as each kernel wants to see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with ordinary strides on dimensions of size 1.

    One KV head leaves a stride that no element uses; TMA descriptors are built from it all the same and
    refuse it or read elsewhere. Engines canonicalise it before the call.
    """
    strides = list(tensor.stride())
    for dim in range(tensor.dim() - 2, -1, -1):
        if tensor.shape[dim] == 1:
            strides[dim] = tensor.shape[dim + 1] * strides[dim + 1]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


def hnd(pool: torch.Tensor) -> torch.Tensor:
    """[pages, heads, page_size, dim] view of a logical NHD pool, strides canonicalised. No copy."""
    return canonical(pool.transpose(1, 2))


def block_delta(k: torch.Tensor, v: torch.Tensor) -> int:
    """Pages from K's start to V's, for kernels that address V relative to K.

    Raises:
        ValueError: V does not lie a whole, positive number of pages after K.
    """
    page_bytes = k.stride(0) * k.element_size()
    delta, rest = divmod(v.data_ptr() - k.data_ptr(), page_bytes)
    if rest or delta <= 0:
        raise ValueError(f"V must start a whole number of pages after K, not {delta} pages and {rest} bytes")
    return delta
