"""The ``cuda_vmm`` arena: every operand in a CUDA memory mapping of its own, between unmapped holes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from autotune.arena.address_space import AddressSpace, Mapping
from autotune.arena.base import ArenaError, Placement

if TYPE_CHECKING:
    from types import TracebackType

# Hostile to whoever reads it: NaN as bf16, fp16, fp32 and e4m3 (0xFF..), page id -1 as int32.
CANARY = 0xFF
# A KV pool is reached by page ids: it asks for the wide hole.
POOLS = ("kv_cache", "k_cache")
# What an engine's allocator guarantees: torch's caching allocator aligns every tensor to 512 bytes, but a
# per-layer or per-batch slice only to its rows. 16 bytes is the least that vectorised loads and TMA accept.
DEFAULT_ALIGN = 16


@lru_cache(maxsize=1)
def address_space() -> AddressSpace:
    """This process's reservation on the current device."""
    torch.empty(1, device="cuda")  # makes the primary context current, which the driver calls need
    return AddressSpace(torch.cuda.current_device())


class _Bytes:
    """Tells torch of device bytes through the CUDA array interface: no copy, no ownership."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] over mapped device memory."""
    return torch.as_tensor(_Bytes(address, nbytes), device="cuda")


@dataclass(slots=True)
class _Operand:
    name: str
    mapping: Mapping
    offset: int
    nbytes: int


class CudaVmmArena:
    """See :class:`autotune.arena.base.Arena`."""

    kind = "cuda_vmm"
    guarded = True

    def __init__(self, placement: Placement = Placement.TAIL, slack: int = 0) -> None:
        self.placement = placement
        self.slack = slack
        self._space = address_space()
        self._operands: list[_Operand] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, align: int | None = None
    ) -> torch.Tensor:
        """See :class:`autotune.arena.base.Arena`; ``align`` defaults to 16 bytes."""
        count = 1
        for extent in shape:
            count *= extent
        nbytes = count * torch.empty((), dtype=dtype).element_size()
        align = align or DEFAULT_ALIGN
        mapping = self._space.map(nbytes + self.slack + align, wide=name in POOLS)
        if self.placement is Placement.TAIL:
            offset = (mapping.size - self.slack - nbytes) // align * align
        else:
            offset = -(-self.slack // align) * align
        operand = _Operand(name, mapping, offset, nbytes)
        self._operands.append(operand)
        bytes_at(mapping.address, mapping.size).fill_(CANARY)
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cuda")
        return bytes_at(mapping.address + offset, nbytes).view(dtype).view(shape)

    def overwritten(self) -> list[str]:
        """See :class:`autotune.arena.base.Arena`."""
        found = []
        for operand in self._operands:
            whole = bytes_at(operand.mapping.address, operand.mapping.size)
            end = operand.offset + operand.nbytes
            for where, part in (
                ("before the start", whole[: operand.offset]),
                ("after the end", whole[end:]),
            ):
                changed = int((part != CANARY).sum()) if part.numel() else 0
                if changed:
                    found.append(f"{operand.name}: {changed} bytes {where}")
        return found

    def site(self, address: int) -> str | None:
        """``"page_table: 64 bytes past the end"`` for an address near an operand, None outside them all."""
        for operand in self._operands:
            start = operand.mapping.address + operand.offset
            end = start + operand.nbytes
            if start - operand.mapping.hole_before <= address < end + operand.mapping.hole_after:
                if address >= end:
                    return f"{operand.name}: {address - end} bytes past the end"
                if address < start:
                    return f"{operand.name}: {start - address} bytes before the start"
                return f"{operand.name}: inside, at byte {address - start}"
        return None

    @property
    def reach(self) -> dict[str, int]:
        """Unmapped bytes behind each operand: how far a wrong page id is sure to fault."""
        return {operand.name: operand.mapping.hole_after for operand in self._operands}

    def __enter__(self) -> CudaVmmArena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        operands, self._operands = self._operands, []
        # After a fault the context is dead and this raises; the process is about to be replaced anyway.
        torch.cuda.synchronize()
        for operand in operands:
            self._space.unmap(operand.mapping)


__all__ = ["ArenaError", "CudaVmmArena", "address_space", "bytes_at"]
