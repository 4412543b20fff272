"""The ``host_mmap`` arena: each operand between inaccessible addresses, so that a stray access is a SIGSEGV.

    reserved_start      body_start     start        end      body_end      reserved_end
         | hole, PROT_NONE | canary      | operand     | slack  | hole, PROT_NONE  |        (tail)

Leaving the arena unmaps everything, tensors that are still referenced included: using one afterwards is a
fault outside every hole. A fresh operand holds the canary pattern as well, since zeros would hide a read
of what was never written.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from typing import TYPE_CHECKING

import torch

from autotune.arena import regions
from autotune.arena.base import ArenaError, Placement
from autotune.arena.regions import Region

if TYPE_CHECKING:
    from types import TracebackType

GIB = 1 << 30
TIB = 1 << 40

HOLE_BYTES = GIB
# A wild page number is an int32 times the bytes of a page: 2**31 x 8 KiB (16 tokens, one head of 128, fp32)
# end 16 TiB past the pool. Negative ones (-1 is the common one) need less.
POOL_HOLE_BYTES = (TIB, 16 * TIB)
POOL_NAMES = frozenset({"kv_cache", "k_cache", "v_cache"})
# Of the 128 TiB that a process has; beyond it the pool's holes shrink to what is left.
RESERVE_LIMIT = 64 * TIB

# 0xFFF7 repeated is a NaN as bf16, fp16, fp32 and fp64, every other element of e4m3, and a page number far
# below zero as int32. It is no kernel's idea of a NaN or of -1, so writing either shows.
CANARY = b"\xf7\xff"

PROT_NONE = 0
MAP_NORESERVE = 0x4000  # Linux; not in the mmap module before Python 3.13
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class HostMmapArena:
    """Guarded host memory. See :class:`autotune.arena.base.Arena`.

    Args:
        placement: which end of each operand is flush with its hole.
        slack: accessible bytes between the flush end and the hole, watched as canaries.
        hole_bytes: hole on either side of an ordinary operand.
        pool_hole_bytes: hole before and after a KV pool (an operand named in ``POOL_NAMES``); narrower where
            address space runs out, down to ``hole_bytes``. ``holes`` says what each operand got.

    Raises:
        ArenaError: not on Linux.
        ValueError: a negative slack or a hole narrower than a memory page.
    """

    kind = "host_mmap"
    guarded = True

    def __init__(
        self,
        placement: Placement = Placement.TAIL,
        slack: int = 0,
        *,
        hole_bytes: int = HOLE_BYTES,
        pool_hole_bytes: tuple[int, int] = POOL_HOLE_BYTES,
    ) -> None:
        if sys.platform != "linux":
            raise ArenaError(f"the host_mmap arena needs Linux, not {sys.platform}; use the plain arena")
        if slack < 0:
            raise ValueError(f"slack must not be negative, not {slack}")
        if min(hole_bytes, *pool_hole_bytes) < mmap.PAGESIZE:
            raise ValueError(f"a hole must be at least one memory page ({mmap.PAGESIZE} bytes) wide")
        self.placement = Placement(placement)
        self.slack = slack
        self.hole_bytes = hole_bytes
        self.pool_hole_bytes = pool_hole_bytes
        self._regions: list[Region] = []
        self._closed = False

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, align: int | None = None
    ) -> torch.Tensor:
        """See :class:`autotune.arena.base.Arena`. A tensor without elements has no memory, so no guard.

        Raises:
            ArenaError: no address space or memory is left, or the arena was left.
            ValueError: ``align`` is not a power of two.
        """
        if self._closed:
            raise ArenaError(f"{name}: the arena was left")
        size = dtype.itemsize
        align = size if align is None else align
        if align < 1 or align & (align - 1) or align > mmap.PAGESIZE:
            raise ValueError(f"{name}: align must be a power of two up to {mmap.PAGESIZE}, not {align}")
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        region = self._map(name, count * size, align)
        buffer = (ctypes.c_ubyte * (region.end - region.start)).from_address(region.start)
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)

    def holes(self) -> dict[str, tuple[int, int]]:
        """Inaccessible bytes before and after each operand; the narrowest where a name occurs twice."""
        widths: dict[str, tuple[int, int]] = {}
        for region in self._regions:
            before, after = region.hole_bytes
            known = widths.get(region.name, (before, after))
            widths[region.name] = (min(before, known[0]), min(after, known[1]))
        return widths

    def overwritten(self) -> list[str]:
        """Changed canary bytes, as ``"out: 8 bytes after the end, from offset 0"``.

        The offset of the first one counts from the operand's end, or from its start if it lies before.
        """
        found = []
        for region in self._regions:
            for begin, end, side, origin in (
                (region.body_start, region.start, "before the start", region.start),
                (region.end, region.body_end, "after the end", region.end),
            ):
                seen = ctypes.string_at(begin, end - begin)
                wanted = _canary(begin, end - begin)
                if seen != wanted:
                    changed = [i for i, (a, b) in enumerate(zip(seen, wanted, strict=True)) if a != b]
                    first = begin + changed[0] - origin
                    found.append(f"{region.name}: {len(changed)} bytes {side}, from offset {first}")
        return found

    def close(self) -> None:
        """Unmap everything; what leaving the arena does."""
        self._closed = True
        while self._regions:
            region = self._regions.pop()
            regions.forget(region)
            _libc.munmap(region.reserved_start, region.reserved_end - region.reserved_start)

    def __enter__(self) -> HostMmapArena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _map(self, name: str, size: int, align: int) -> Region:
        slack = -(-self.slack // align) * align
        body = _whole_pages(size + slack)  # a memory page is a multiple of any alignment
        reserved, before, after = self._reserve(name, body)
        body_start = reserved + before
        if _libc.mprotect(body_start, body, mmap.PROT_READ | mmap.PROT_WRITE):
            error = ctypes.get_errno()
            _libc.munmap(reserved, before + body + after)
            raise ArenaError(f"{name}: {body} bytes of memory cannot be had: {os.strerror(error)}")
        if self.placement is Placement.TAIL:
            start = (body_start + body - self.slack - size) // align * align
        else:
            start = body_start + slack
        region = Region(
            name,
            reserved,
            body_start,
            start,
            start + size,
            body_start + body,
            reserved + before + body + after,
        )
        whole = (ctypes.c_ubyte * body).from_address(body_start)
        torch.frombuffer(whole, dtype=torch.int16).fill_(int.from_bytes(CANARY, "little", signed=True))
        regions.register(region)
        self._regions.append(region)
        return region

    def _reserve(self, name: str, body: int) -> tuple[int, int, int]:
        """Address space for ``body`` bytes and its holes: address, hole before, hole after."""
        narrow = (_whole_pages(self.hole_bytes), _whole_pages(self.hole_bytes))
        before, after = narrow
        if name in POOL_NAMES:
            left = RESERVE_LIMIT - regions.reserved_bytes() - body
            before, after = (_whole_pages(width) for width in self.pool_hole_bytes)
            while (before, after) != narrow and before + after > left:
                before, after = _halved(before, narrow[0]), _halved(after, narrow[1])
        while True:
            address = _libc.mmap(
                None,
                before + body + after,
                PROT_NONE,
                mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE,
                -1,
                0,
            )
            if address not in (None, MAP_FAILED):
                return address, before, after
            if (before, after) == narrow:
                reason = os.strerror(ctypes.get_errno())
                raise ArenaError(
                    f"{name}: {before + body + after} bytes of addresses cannot be had: {reason}"
                )
            before, after = _halved(before, narrow[0]), _halved(after, narrow[1])


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _halved(width: int, least: int) -> int:
    """Half of ``width``, not below ``least``; a width already narrower than that becomes it."""
    return max(_whole_pages(width // 2), least)


def _canary(address: int, size: int) -> bytes:
    """The canary bytes of ``size`` bytes at ``address``: the pattern follows the address, not the operand."""
    pattern = CANARY * (size // 2 + 1)
    return pattern[address % 2 : address % 2 + size]
