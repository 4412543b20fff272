"""The ``Arena`` protocol: memory in which a kernel's stray access cannot go unseen.

Each operand gets a mapping of its own inside a hole of inaccessible addresses. With placement ``tail``
the operand's end is flush with the end of its mapping (at the alignment the engine guarantees), with
``head`` its start is flush with the beginning: an access outside then faults in the launch that makes it,
at the kernel's full speed. Bytes of the mapping that the operand does not cover are filled with a canary
pattern, hostile to whoever reads it and checked for writes.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

    import torch


class Placement(str, Enum):
    """Which end of an operand is flush with inaccessible memory."""

    TAIL = "tail"
    HEAD = "head"


class Arena(Protocol):
    """Operands of one session. Use as a context manager: leaving it unmaps everything."""

    @property
    def kind(self) -> str:
        """``host_mmap``, ``cuda_vmm`` or ``plain``."""

    @property
    def guarded(self) -> bool:
        """Whether an access outside an operand faults."""

    @property
    def placement(self) -> Placement:
        """Which end is flush."""

    @property
    def slack(self) -> int:
        """Bytes of accessible padding between an operand's flush end and the hole."""

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, align: int | None = None
    ) -> torch.Tensor:
        """A contiguous, uninitialised tensor in a mapping of its own.

        Args:
            name: shows in messages; need not be unique.
            align: byte alignment that the engine guarantees for this operand; the element size if None.
                More alignment than that would hide an overrun.

        Raises:
            ArenaError: the mapping cannot be had.
        """

    def overwritten(self) -> list[str]:
        """Operands whose canary bytes have changed, as ``"out: 8 bytes after the end"``; [] if none."""

    def __enter__(self) -> Arena: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class ArenaError(RuntimeError):
    """Memory could not be mapped: a reason for ``unproven``, never an accusation."""
