"""One reservation of GPU virtual addresses per process, handed out with holes around each piece.

A GPU has 128 TiB of address space. Reserving and freeing wide holes per cell fragments it until
``CUDA_ERROR_OUT_OF_MEMORY``; one reservation, mapped and unmapped inside, does not. Addresses are given
out by a bump pointer that returns to the base when nothing is mapped any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.arena.base import ArenaError

TIB = 1 << 40
GIB = 1 << 30

# 96 TiB of the 128: torch, the driver and the libraries keep the rest.
RESERVED = 96 * TIB
# A stray index into a small operand rarely leaves 4 GiB; the KV pool is reached by a 32-bit page id, which
# at 16 KiB pages spans 32 TiB. One pool at a time gets the wide zone, further ones the small hole.
SMALL_HOLE = 4 * GIB
WIDE_ZONE_START = 32 * TIB
WIDE_BEFORE = 24 * TIB
WIDE_HOLE = 32 * TIB


def driver() -> Any:
    """``cuda.bindings.driver``; raises :class:`ArenaError` with the package to install."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise ArenaError(
            "guarded CUDA memory needs the package cuda-bindings: pip install cuda-bindings"
        ) from error
    return module


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function; its single result, or the tuple of them.

    Raises:
        ArenaError: the driver answered anything but CUDA_SUCCESS.
    """
    module = driver()
    error, *results = getattr(module, name)(*arguments)
    if error != module.CUresult.CUDA_SUCCESS:
        raise ArenaError(f"{name} failed: {error.name}")
    return results[0] if len(results) == 1 else tuple(results)


@dataclass(slots=True)
class Mapping:
    """One piece of mapped memory.

    Attributes:
        address, size: the mapped bytes, a multiple of the granularity.
        hole_before, hole_after: unmapped bytes on either side that nothing else uses.
    """

    address: int
    size: int
    hole_before: int
    hole_after: int
    handle: Any
    wide: bool


class AddressSpace:
    """The reservation of one process and device. Not thread-safe: a child runs one job at a time."""

    def __init__(self, device_index: int = 0, reserved: int = RESERVED) -> None:
        module = driver()
        location = module.CUmemLocation()
        location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device_index
        self._properties = module.CUmemAllocationProp()
        self._properties.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._access = module.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.granularity = int(
            call(
                "cuMemGetAllocationGranularity",
                self._properties,
                module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )
        self.base = int(call("cuMemAddressReserve", reserved, 0, 0, 0))
        self.reserved = reserved
        self._next = self.base + SMALL_HOLE
        self._live: dict[int, Mapping] = {}
        self._wide_used = False

    def map(self, nbytes: int, *, wide: bool = False) -> Mapping:
        """Map at least ``nbytes`` with unmapped addresses on both sides.

        Args:
            wide: ask for the wide zone (32 TiB behind it); granted to one mapping at a time.

        Raises:
            ArenaError: device memory or the reservation is exhausted.
        """
        size = -(-max(nbytes, 1) // self.granularity) * self.granularity
        wide = wide and not self._wide_used and self.reserved >= WIDE_ZONE_START + WIDE_HOLE + size
        if wide:
            address, before, after = self.base + WIDE_ZONE_START, WIDE_BEFORE, WIDE_HOLE
        else:
            address, before, after = self._next, SMALL_HOLE, SMALL_HOLE
            if address + size + SMALL_HOLE > self.base + WIDE_ZONE_START - WIDE_BEFORE:
                raise ArenaError(
                    f"the address reservation is full after {len(self._live)} mappings; "
                    "close earlier arenas before opening more"
                )
        handle = call("cuMemCreate", size, self._properties, 0)
        try:
            call("cuMemMap", address, size, 0, handle, 0)
            try:
                call("cuMemSetAccess", address, size, [self._access], 1)
            except ArenaError:
                call("cuMemUnmap", address, size)
                raise
        except ArenaError:
            call("cuMemRelease", handle)
            raise
        mapping = Mapping(address, size, before, after, handle, wide)
        self._live[address] = mapping
        if wide:
            self._wide_used = True
        else:
            self._next = address + size + SMALL_HOLE
        return mapping

    def unmap(self, mapping: Mapping) -> None:
        """Unmap; no kernel may still use it (synchronise first)."""
        del self._live[mapping.address]
        call("cuMemUnmap", mapping.address, mapping.size)
        call("cuMemRelease", mapping.handle)
        if mapping.wide:
            self._wide_used = False
        if not any(not other.wide for other in self._live.values()):
            self._next = self.base + SMALL_HOLE

    @property
    def live(self) -> tuple[Mapping, ...]:
        """What is mapped now."""
        return tuple(self._live.values())

    def contains(self, address: int) -> bool:
        """Whether ``address`` lies in the reservation, mapped or not."""
        return self.base <= address < self.base + self.reserved
