"""XQA's packed mask of the new tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def causal_mask_rows(q_len: int) -> list[list[int]]:
    """[q_len][2 x ceil(q_len / 32)] 16-bit words: bit j of row i is set where token j is visible to token i.

    The low half of each 32-bit word comes first. Earlier tokens of the request are always visible, they
    have no bits here.
    """
    words = 2 * -(-q_len // 32)
    return [[((1 << (row + 1)) - 1) >> (16 * word) & 0xFFFF for word in range(words)] for row in range(q_len)]


def fill_causal_mask(mask: torch.Tensor) -> None:
    """Write the causal mask of ``mask.shape[1]`` tokens into every request of ``mask``.

    Args:
        mask: uint16 [batch, q_len, 2 x ceil(q_len / 32)].
    """
    import torch

    # via int16: arithmetic and copies on uint16 are not implemented on every device
    rows = torch.tensor(causal_mask_rows(mask.shape[1]), dtype=torch.int32).to(torch.int16)
    mask.view(torch.int16).copy_(rows.to(mask.device).expand(mask.shape))
