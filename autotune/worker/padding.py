"""Padding after an operand's end, and only there, for runs that allow it.

An arena's own slack lies at the flush end: with placement ``head`` that is before the operand, where an
engine promises nothing. A kernel that reads in front of its operands must fault there whatever is allowed
behind them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from autotune.arena.base import Placement
from autotune.arena.factory import open_arena

if TYPE_CHECKING:
    from types import TracebackType

    from autotune.arena.base import Arena


def open_padded(kind: str, device: str, placement: Placement, padding: int) -> Arena:
    """An arena whose operands have ``padding`` accessible bytes after their end and none before."""
    if padding == 0 or placement is Placement.TAIL:
        return open_arena(kind, device, placement, padding)
    return TailPadded(open_arena(kind, device, placement), padding)


class TailPadded:
    """An arena whose every operand ends ``padding`` bytes early; what follows is watched for writes."""

    def __init__(self, arena: Arena, padding: int) -> None:
        self.kind = arena.kind
        self.guarded = arena.guarded
        self.placement = arena.placement
        self.slack = padding
        self._arena = arena
        self._tails: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, align: int | None = None
    ) -> torch.Tensor:
        """See :class:`autotune.arena.base.Arena`."""
        count = math.prod(shape)
        extra = -(-self.slack // dtype.itemsize)
        whole = self._arena.tensor(name, (count + extra,), dtype, align=align)
        tail = whole[count:].view(torch.uint8)
        self._tails.append((name, tail, tail.clone()))
        return whole[:count].view(shape)

    def overwritten(self) -> list[str]:
        """The arena's own findings, then the padding's."""
        found = self._arena.overwritten()
        for name, tail, before in self._tails:
            changed = (tail != before).nonzero()
            if len(changed):
                found.append(f"{name}: {len(changed)} bytes after the end, from offset {int(changed[0])}")
        return found

    def __enter__(self) -> TailPadded:
        self._arena.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tails.clear()
        self._arena.__exit__(kind, error, traceback)
