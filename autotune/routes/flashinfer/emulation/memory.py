"""Reads and writes at addresses, as a kernel makes them: nobody looks whether the memory is the operand's.

What goes past an operand in guarded memory ends the process with a real SIGSEGV.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

# Entries read at a time: a length that is garbage must fault at the table's end, not ask for its size first.
_CHUNK = 256


def strided(address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A view of the memory at ``address``.

    Args:
        strides: in elements of ``dtype``, none of them negative.
    """
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(tuple(shape), tuple(strides))


def flat(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """``count`` elements at ``address``, as a view."""
    return strided(address, dtype, (count,), (1,))


def integers(address: int, count: int) -> list[int]:
    """``count`` int32 values at ``address``; none if the count is negative."""
    found: list[int] = []
    for start in range(0, count, _CHUNK):
        part = flat(address + 4 * start, torch.int32, min(_CHUNK, count - start))
        found += part.tolist()
    return found


def real(address: int) -> float:
    """The fp32 value at ``address``."""
    return float(flat(address, torch.float32, 1)[0])
