"""A torch allocator whose every block is guarded: catches overruns of what a library allocates itself.

Two ctypes callbacks over CUDA virtual memory, handed to torch by their addresses before the first CUDA
call. Each block is a mapping of its own, its end flush with the mapping's end at 256 bytes. A process that
has installed it must leave by ``os._exit``: at interpreter shutdown the callbacks outlive their globals.
"""

from __future__ import annotations

import ctypes
from typing import Any

# cudaMalloc and torch's allocator guarantee at least this much; libraries rely on it.
ALIGN = 256

_ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

# Kept for the life of the process: torch holds raw addresses of the callbacks.
_keep: list[Any] = []
blocks: dict[int, tuple[Any, int]] = {}
total_allocations = 0


def install() -> None:
    """Make torch's CUDA allocations guarded. Call before the first CUDA call of the process.

    Raises:
        RuntimeError: torch has initialised CUDA already.
    """
    import torch

    from autotune.arena.address_space import AddressSpace, call

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("the guarded torch allocator must be installed before the first CUDA call")
    spaces: dict[int, AddressSpace] = {}

    def allocate(size: int, device: int, stream: int | None) -> int | None:
        global total_allocations
        try:
            if device not in spaces:
                # A second, smaller reservation beside the arena's own.
                spaces[device] = AddressSpace(device, reserved=16 << 40)
            rounded = -(-max(size, 1) // ALIGN) * ALIGN
            mapping = spaces[device].map(rounded)
            address = mapping.address + mapping.size - rounded
            blocks[address] = (mapping, size)
            total_allocations += 1
            return address
        except Exception:
            return None  # torch reports it as out of memory

    def release(address: int | None, size: int, device: int, stream: int | None) -> None:
        if address is None or address not in blocks:
            return
        mapping, _ = blocks.pop(address)
        try:
            # Only this stream is waited for: after a fault a context-wide wait inside a callback surfaces
            # as a bare SystemError.
            call("cuStreamSynchronize", stream or 0)
            spaces[device].unmap(mapping)
        except Exception:
            return

    _keep.extend([_ALLOC(allocate), _FREE(release)])
    pointers = [ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in _keep[-2:]]
    allocator = torch._C._cuda_customAllocator(*pointers)
    torch._C._cuda_changeCurrentAllocator(allocator)
    _keep.append(allocator)
