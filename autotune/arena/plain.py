"""The ``plain`` arena: allocations without guards, for timing and for tools that watch the allocator.

On CUDA torch keeps freed memory and cuts allocations out of larger ones, which makes the next cell's pools
cheap. compute-sanitizer needs every allocation to be the driver's own: run it with
``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` in the environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autotune.arena.base import Placement

if TYPE_CHECKING:
    from types import TracebackType


class PlainArena:
    """One ordinary allocation per operand."""

    kind = "plain"
    guarded = False

    def __init__(self, device: str = "cpu", placement: Placement = Placement.TAIL, slack: int = 0) -> None:
        self.device = device
        self.placement = placement
        self.slack = slack
        self._live: list[torch.Tensor] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, align: int | None = None
    ) -> torch.Tensor:
        """See :class:`autotune.arena.base.Arena`; ``align`` is whatever the allocator gives."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._live.append(tensor)
        return tensor

    def overwritten(self) -> list[str]:
        """Nothing is watched here."""
        return []

    def __enter__(self) -> PlainArena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.clear()
