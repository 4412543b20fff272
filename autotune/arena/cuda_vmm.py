"""The ``cuda_vmm`` arena: every operand in a CUDA memory mapping of its own, between unmapped holes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from autotune.arena.address_space import AddressSpace, Mapping, driver
from autotune.arena.base import ArenaError, Placement

if TYPE_CHECKING:
    from types import TracebackType

# Hostile to whoever reads it: NaN as bf16, fp16, fp32 and e4m3 (0xFF..), page id -1 as int32.
CANARY = 0xFF
# A KV pool is reached by page ids: it asks for the wide hole.
POOLS = ("kv_cache", "k_cache", "v_cache")
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


def offset_of(
    placement: Placement, size: int, nbytes: int, slack: int = 0, align: int = DEFAULT_ALIGN
) -> int:
    """Where an operand begins in a mapping of ``size`` bytes: at the alignment, as near to its end or start
    as ``slack`` lets it. What is left between them is canary, not a hole: fewer than ``align`` bytes."""
    if placement is Placement.TAIL:
        return (size - slack - nbytes) // align * align
    return -(-slack // align) * align


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
        """Raises :class:`ArenaError` without a CUDA device or without cuda-bindings."""
        if slack < 0:
            raise ValueError(f"slack must not be negative, not {slack}")
        driver()
        if not torch.cuda.is_available():
            raise ArenaError("the cuda_vmm arena needs a CUDA device")
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
        offset = offset_of(self.placement, mapping.size, nbytes, self.slack, align)
        operand = _Operand(name, mapping, offset, nbytes)
        self._operands.append(operand)
        bytes_at(mapping.address, mapping.size).fill_(CANARY)
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device="cuda")
        return bytes_at(mapping.address + offset, nbytes).view(dtype).view(shape)

    def overwritten(self) -> list[str]:
        """See :class:`autotune.arena.base.Arena`. Waits for the device once, whatever the operands."""
        parts: list[tuple[str, str, torch.Tensor]] = []
        for operand in self._operands:
            whole = bytes_at(operand.mapping.address, operand.mapping.size)
            end = operand.offset + operand.nbytes
            for where, part in (
                ("before the start", whole[: operand.offset]),
                ("after the end", whole[end:]),
            ):
                if part.numel():
                    parts.append((operand.name, where, part))
        if not parts:
            return []
        touched = torch.stack([(part != CANARY).any() for _, _, part in parts]).tolist()
        found = []
        for (name, where, part), hit in zip(parts, touched, strict=True):
            if hit:
                changed = (part != CANARY).nonzero()
                first = int(changed[0])
                offset = first - part.numel() if where == "before the start" else first
                found.append(f"{name}: {len(changed)} bytes {where}, from offset {offset}")
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
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            if error is None:
                raise
            return  # the fault is on its way already, and the process about to be replaced
        for operand in operands:
            self._space.unmap(operand.mapping)


__all__ = ["ArenaError", "CudaVmmArena", "address_space", "bytes_at", "offset_of"]
