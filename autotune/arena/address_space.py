"""One reservation of GPU virtual addresses per process, handed out with holes around each piece.

A GPU has 128 TiB of address space. Reserving and freeing wide holes per cell fragments it until
``CUDA_ERROR_OUT_OF_MEMORY``; one reservation, mapped and unmapped inside, does not. Addresses are given
out by a bump pointer that returns to the base when nothing is mapped any more; only when it has reached the
end are freed places used again, the longest free first, so that stale pointers fault for as long as can be.
Physical memory is kept for the next mapping of its size: creating it takes longer than mapping it.
"""

from __future__ import annotations

from collections import defaultdict, deque
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
# Physical memory kept for reuse.
KEPT_BYTES = 2 << 30


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
        self._has_wide_zone = reserved >= WIDE_ZONE_START + WIDE_HOLE
        self._end = self.base + (WIDE_ZONE_START - WIDE_BEFORE if self._has_wide_zone else reserved)
        self._live: dict[int, Mapping] = {}
        self._wide_used = False
        self._places: deque[tuple[int, int]] = deque()  # (address, size) of what was unmapped
        self._kept: defaultdict[int, list[Any]] = defaultdict(list)  # physical memory by size
        self._kept_bytes = 0

    def map(self, nbytes: int, *, wide: bool = False) -> Mapping:
        """Map at least ``nbytes`` with unmapped addresses on both sides.

        Args:
            wide: ask for the wide zone (32 TiB behind it); granted to one mapping at a time.

        Raises:
            ArenaError: device memory or the reservation is exhausted.
        """
        size = -(-max(nbytes, 1) // self.granularity) * self.granularity
        wide = wide and self._has_wide_zone and not self._wide_used
        if wide:
            address, before, after = self.base + WIDE_ZONE_START, WIDE_BEFORE, WIDE_HOLE
            if WIDE_ZONE_START + size + WIDE_HOLE > self.reserved:
                after = self.reserved - WIDE_ZONE_START - size
        else:
            address, before, after = self._place(size), SMALL_HOLE, SMALL_HOLE
        handle = self._physical(size)
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
            self._next = max(self._next, address + size + SMALL_HOLE)
        return mapping

    def _place(self, size: int) -> int:
        """An address for ``size`` bytes with a small hole on both sides."""
        if self._next + size + SMALL_HOLE <= self._end:
            return self._next
        for index, (address, known) in enumerate(self._places):
            if known >= size:
                del self._places[index]
                return address
        raise ArenaError(
            f"the address reservation is full after {len(self._live)} mappings; "
            "close earlier arenas before opening more"
        )

    def _physical(self, size: int) -> Any:
        kept = self._kept[size]
        if kept:
            self._kept_bytes -= size
            return kept.pop()
        try:
            return call("cuMemCreate", size, self._properties, 0)
        except ArenaError:
            self.trim()
            return call("cuMemCreate", size, self._properties, 0)

    def trim(self) -> None:
        """Give the physical memory back that is kept for reuse."""
        for handles in self._kept.values():
            while handles:
                call("cuMemRelease", handles.pop())
        self._kept_bytes = 0

    def unmap(self, mapping: Mapping) -> None:
        """Unmap; no kernel may still use it (synchronise first)."""
        del self._live[mapping.address]
        call("cuMemUnmap", mapping.address, mapping.size)
        if self._kept_bytes + mapping.size <= KEPT_BYTES:
            self._kept[mapping.size].append(mapping.handle)
            self._kept_bytes += mapping.size
        else:
            call("cuMemRelease", mapping.handle)
        if mapping.wide:
            self._wide_used = False
        else:
            self._places.append((mapping.address, mapping.size))
        if not any(not other.wide for other in self._live.values()):
            self._next = self.base + SMALL_HOLE
            self._places.clear()

    @property
    def live(self) -> tuple[Mapping, ...]:
        """What is mapped now."""
        return tuple(self._live.values())

    @property
    def physical_bytes(self) -> int:
        """Device memory held: mapped, and kept for reuse."""
        return self._kept_bytes + sum(mapping.size for mapping in self._live.values())

    def contains(self, address: int) -> bool:
        """Whether ``address`` lies in the reservation, mapped or not."""
        return self.base <= address < self.base + self.reserved
