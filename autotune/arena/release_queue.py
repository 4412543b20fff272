"""A free callback for torch that runs no Python.

torch frees a tensor wherever its last reference goes, also while an exception is on its way through the
interpreter (the end of an iteration is one). A ctypes callback entered then runs Python with an error
pending, and the process dies of ``SystemError: ... returned a result with an exception set``. So the callback
is C: it notes the address, and the allocator takes what was noted when it is next asked for memory.

The C compiler that Triton and FlashInfer need for their own kernels compiles it, in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from autotune.arena.base import ArenaError

# Addresses noted between two allocations; a check frees a few hundred tensors.
SLOTS = 1 << 16

SOURCE = f"""
#include <stddef.h>
#include <stdint.h>
uint64_t autotune_slots[{SLOTS}];
uint64_t autotune_count;
void autotune_release(void *address, size_t size, int device, void *stream) {{
    (void)size; (void)device; (void)stream;
    if (!address) return;
    uint64_t slot = __atomic_fetch_add(&autotune_count, 1, __ATOMIC_RELAXED);
    if (slot < {SLOTS}) __atomic_store_n(&autotune_slots[slot], (uint64_t)address, __ATOMIC_RELEASE);
}}
"""


class ReleaseQueue:
    """The compiled callback and what it has noted.

    Raises:
        ArenaError: there is no C compiler, or it failed.
    """

    def __init__(self) -> None:
        compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
        if compiler is None:
            raise ArenaError("guarding what libraries allocate needs a C compiler (cc, gcc or clang)")
        with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
            source, library = Path(folder, "release.c"), Path(folder, "release.so")
            source.write_text(SOURCE)
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", os.fspath(library), os.fspath(source)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise ArenaError(f"{compiler} cannot compile the free callback: {last}")
            self._library = ctypes.CDLL(os.fspath(library))
        self._count = ctypes.c_uint64.in_dll(self._library, "autotune_count")
        self._slots = (ctypes.c_uint64 * SLOTS).in_dll(self._library, "autotune_slots")

    @property
    def pointer(self) -> int:
        """Address of ``void (void *address, size_t size, int device, void *stream)``."""
        return ctypes.cast(self._library.autotune_release, ctypes.c_void_p).value or 0

    def take(self) -> list[int]:
        """The addresses noted since the last call. Nothing may be freed meanwhile by another thread."""
        count = min(self._count.value, SLOTS)
        if not count:
            return []
        addresses = self._slots[:count]
        self._count.value = 0
        return [address for address in addresses if address]
