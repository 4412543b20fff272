"""A torch allocator that guards what a library allocates for itself, while a route runs.

Two callbacks, handed to torch by their addresses before the first CUDA call of the process: one that
allocates, in Python, and one that notes what is freed, in C (``release_queue`` says why). Inside
:func:`guarding` (a route is opened, prepared, run) every block is a CUDA virtual-memory mapping of its own,
its end flush with the mapping's at 256 bytes, unmapped addresses around it. Outside, our own code (operands,
references) gets plain device memory from free lists, as quick as torch's own allocator.

A process that has installed it must leave by ``os._exit``: at interpreter shutdown the callbacks outlive
their globals. When no memory is left it leaves at once: torch does not look at what a custom allocator
returns, and a kernel on a null pointer would be accused of our shortage.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from autotune.arena.address_space import Mapping

# cudaMalloc and torch's allocator guarantee at least this much; libraries rely on it.
ALIGN = 256
# Address space for guarded blocks, beside the arena's own 96 TiB.
RESERVED = 16 << 40
# Plain blocks: powers of two up to this, then multiples of it.
PLAIN_STEP = 32 << 20
PLAIN_LEAST = 512
# Larger blocks, and all beyond this total, go back to the driver: operands are mapped from what is left.
KEEP_BLOCK = 256 << 20
KEEP_BYTES = 2 << 30
OUT_OF_MEMORY_STATUS = 70

_ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@dataclass(slots=True)
class Block:
    """One live allocation on ``device``.

    ``mapping`` is None for a plain one, whose memory has ``capacity`` bytes.
    """

    address: int
    size: int
    capacity: int
    mapping: Mapping | None = None
    device: int = 0


class State:
    """The allocator's books; :func:`install` makes the process's only one, which is never freed."""

    def __init__(self, freed: Callable[[], list[int]] = list) -> None:
        self._freed = freed
        self.guarding = False
        self.holding = False
        self.live: dict[int, Block] = {}
        self.guarded_total = 0
        self.guarded_bytes = 0
        self._held: list[Block] = []
        self._free: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._free_bytes = 0
        self._spaces: dict[int, Any] = {}
        self._devices: set[int] = set()

    def allocate(self, size: int, device: int) -> int:
        """Address of a new block."""
        if device not in self._devices:
            _make_context_current(device)
            self._devices.add(device)
        self.collect()
        block = self._guarded(size, device) if self.guarding else self._plain(size, device)
        block.device = device
        self.live[block.address] = block
        return int(block.address)

    def collect(self) -> None:
        """Give back what torch has freed since the last call."""
        for address in self._freed():
            self.release(address)

    def release(self, address: int) -> None:
        """Give a block back; while a graph may use it, only note it."""
        block = self.live.pop(address, None)
        if block is None:
            return
        device = block.device
        if block.mapping is None:
            self._keep_plain(block, device)
        elif self.holding:
            self._held.append(block)
        else:
            self._unmap(block, device)

    def _keep_plain(self, block: Block, device: int) -> None:
        from autotune.arena.address_space import call

        if block.capacity > KEEP_BLOCK or self._free_bytes + block.capacity > KEEP_BYTES:
            with contextlib.suppress(Exception):  # fails in a fault's wake; see _unmap
                call("cuMemFree", block.address)
            return
        # All our work is on one stream, in order: whoever gets the block next runs after its last user.
        self._free[device, block.capacity].append(block.address)
        self._free_bytes += block.capacity

    @property
    def physical_bytes(self) -> int:
        """Device memory held: live blocks, guarded or plain, and what is kept for reuse."""
        plain = sum(block.capacity for block in self.live.values() if block.mapping is None)
        guarded = sum(int(space.physical_bytes) for space in self._spaces.values())
        return plain + self._free_bytes + guarded

    def drop_held(self, device: int) -> None:
        """Unmap what was released while a graph was alive."""
        held, self._held = self._held, []
        for block in held:
            self._unmap(block, device)

    def _guarded(self, size: int, device: int) -> Block:
        from autotune.arena.address_space import AddressSpace

        if device not in self._spaces:
            self._spaces[device] = AddressSpace(device, reserved=RESERVED)
        rounded = -(-max(size, 1) // ALIGN) * ALIGN
        mapping = self._spaces[device].map(rounded)
        self.guarded_total += 1
        self.guarded_bytes += size
        return Block(mapping.address + mapping.size - rounded, size, rounded, mapping)

    def _unmap(self, block: Block, device: int) -> None:
        from autotune.arena.address_space import call

        # In a fault's wake this fails; the block stays mapped in a process that is about to be replaced.
        with contextlib.suppress(Exception):
            call("cuCtxSynchronize")
            self._spaces[device].unmap(block.mapping)

    def _plain(self, size: int, device: int) -> Block:
        from autotune.arena.address_space import call

        if size <= PLAIN_STEP:
            capacity = max(PLAIN_LEAST, 1 << (size - 1).bit_length()) if size > 1 else PLAIN_LEAST
        else:
            capacity = -(-size // PLAIN_STEP) * PLAIN_STEP
        free = self._free[device, capacity]
        if free:
            self._free_bytes -= capacity
            return Block(free.pop(), size, capacity)
        try:
            return Block(int(call("cuMemAlloc", capacity)), size, capacity)
        except RuntimeError:
            self._give_back(device)
            return Block(int(call("cuMemAlloc", capacity)), size, capacity)

    def _give_back(self, device: int) -> None:
        from autotune.arena.address_space import call

        call("cuCtxSynchronize")
        for (owner, capacity), addresses in self._free.items():
            if owner == device:
                while addresses:
                    call("cuMemFree", addresses.pop())
                    self._free_bytes -= capacity
        for space in self._spaces.values():
            space.trim()


def _make_context_current(device: int) -> None:
    """torch may ask for memory before any runtime call has made the primary context current."""
    from autotune.arena.address_space import call

    call("cuInit", 0)
    if not int(call("cuCtxGetCurrent")):
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device)))


_state: State | None = None
# torch holds raw addresses of the callbacks for the life of the process.
_keep: list[Any] = []


def installed() -> State | None:
    """The allocator's books, None where torch's own allocator is in use."""
    return _state


@contextlib.contextmanager
def guarding() -> Iterator[None]:
    """Guard what torch allocates meanwhile. Does nothing where the allocator is not installed."""
    if _state is None or _state.guarding:
        yield
        return
    _state.guarding = True
    try:
        yield
    finally:
        _state.guarding = False


@contextlib.contextmanager
def holding() -> Iterator[None]:
    """Keep guarded blocks mapped that are released meanwhile: a captured graph goes on using them."""
    if _state is None or _state.holding:
        yield
        return
    _state.holding = True
    try:
        yield
    finally:
        _state.collect()
        _state.holding = False
        import torch

        _state.drop_held(torch.cuda.current_device())


def install() -> None:
    """Make this torch's CUDA allocator. Call before the first CUDA call of the process.

    Raises:
        ArenaError: cuda-bindings or a C compiler is not installed.
        RuntimeError: torch has initialised CUDA already, or is built without it.
    """
    global _state
    import torch

    from autotune.arena.address_space import driver
    from autotune.arena.release_queue import ReleaseQueue

    driver()
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise RuntimeError("this build of torch has no CUDA")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("the guarded torch allocator must be installed before the first CUDA call")
    freed = ReleaseQueue()
    state = State(freed.take)

    def allocate(size: int, device: int, _stream: int | None) -> int:
        return int(_undisturbed(lambda: state.allocate(size, device)))

    callback = _ALLOC(allocate)
    allocator = torch._C._cuda_customAllocator(
        ctypes.cast(callback, ctypes.c_void_p).value or 0, freed.pointer
    )
    torch._C._cuda_changeCurrentAllocator(allocator)
    _keep.extend([callback, freed, allocator])
    _state = state


def _undisturbed(action: Callable[[], Any]) -> Any:
    """Run the callback's work. A collection in its middle could free tensors while books are open."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return action()
    except Exception as error:
        # The worker reads this from our output; "out of memory" accuses nobody.
        os.write(2, f"\nCUDA out of memory in the guarded allocator: {error}\n".encode())
        os._exit(OUT_OF_MEMORY_STATUS)
    finally:
        if collecting:
            gc.enable()
