"""Bit patterns that fill an output before a launch: what still holds one was not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.arena.contents import bits

if TYPE_CHECKING:
    import torch

# Quiet NaNs with a payload that no arithmetic makes by itself, by element size: an element that still has
# exactly these bits was not written. 1-byte types (e4m3) have a single NaN pattern.
POISON_BITS = {1: 0x7F, 2: 0x7FD5, 4: 0x7FD5A5A5, 8: 0x7FFD5A5A5A5A5A5A}
# A finite poison far outside the live range (V is below 6, codes below 9, hostile values are 320 at most).
POISON_MAGIC = {1: 0x7E, 2: 0x5BD5, 4: 0x5BD5A5A5, 8: 0x5BD5A5A5A5A5A5A5}


def poison(out: torch.Tensor, patterns: dict[int, int] = POISON_BITS) -> None:
    """Fill ``out`` with the pattern of its element size."""
    bits(out).fill_(patterns[out.element_size()])


def poisoned(out: torch.Tensor, patterns: dict[int, int] = POISON_BITS) -> torch.Tensor:
    """Boolean mask of the elements that still hold the poison."""
    return bits(out) == patterns[out.element_size()]
