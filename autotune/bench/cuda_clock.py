"""CUDA: replays of graphs, timed with events, every launch on a KV pool that is not in the cache.

**A group.** Each route is captured once in a cell: one graph that launches it on every operand set in turn.
The sets have KV pools, queries and outputs of their own and share one page table and one tensor of lengths;
each has a session of its own, and these sessions get the *same* buffers, so that preparing one of them
prepares the whole graph. A round writes new lengths and permuted pages into the shared tensors, calls
``prepare`` once, as an engine does once a step, and replays the graph as often as the group needs.

**Cold caches.** Before every replay a buffer larger than the L2 cache is read (read, not written: dirty lines
would have to be written back in the timed part). Within a replay every launch has its own pool. So no launch
finds its KV in the cache, however small the pools are, and the host has queued the replay by the time the
flush ends: the events around it see no launch gap of ours.

**A route that cannot be captured** is launched eagerly between the same events, its sessions all prepared.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from math import ceil
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

import torch

from autotune.bench.clock import BenchError, GroupTimes, Launch, TimingFindingError, opened
from autotune.bench.conditions import Monitor, cuda_monitor
from autotune.bench.pools import pool_bytes
from autotune.bench.record import Finding
from autotune.checks.poison import poison
from autotune.domain.verdict import FailureKind
from autotune.routes.base import Capture

if TYPE_CHECKING:
    from types import TracebackType

    from autotune.bench.pools import Pools
    from autotune.domain.cell import Cell
    from autotune.routes.base import Allocate, Route, Session

# Operand sets rotate past twice the L2 cache where that takes no more than these; each is a launch of the
# captured graph and a session to open.
MOST_SETS = 16
LEAST_SETS = 2
# Reading a pool of this size takes longer than a group must last (0.27 ms at 8 TB/s, as fast as memory gets
# today): one set is a group by itself. Where less is read (short rows, a window) a group is a few replays.
ONE_SET_BYTES = 2 * 2**30
# The flush reads this many times the L2 cache: one would leave what its replacement policy protects.
FLUSH_CACHES = 3
# What a route's sessions and a pool's making may take beside the pools (workspaces are half of it).
ROUTE_BYTES = 2**30
BUILD_BYTES = 2 * 2**30
# A launch longer than this hides any host time: the eager call that measures it is made once.
HIDES_HOST_US = 1000.0
# torch keeps freed memory for the next cell; more would be missed where guarded operands are mapped.
KEEP_BYTES = 8 * 2**30
# SM clock at which the device counts as running as before, of what it ran at then.
WARM_SHARE = 0.97
# Largest ||replay - eager|| / ||eager||, the same kernel on the same operands: only the order of additions
# may differ. A length off by a twentieth moves the output by a fifth of its norm, a stale page table by
# all of it.
AGREE = 0.05


class Gpu(Protocol):
    """The few things a stand asks of the device; all on one stream."""

    def timed(self, launch: Callable[[], None], times: int) -> float:
        """Microseconds of device time of ``times`` cold launches together; nothing is pending afterwards."""

    def capture(self, body: Callable[[], None]) -> tuple[Callable[[], None], Callable[[], None]]:
        """A graph of what ``body`` launches: how to replay it, how to free it."""

    def synchronize(self) -> None:
        """Wait; raises what has gone wrong."""


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class TorchGpu:
    """The current device through torch. Use it inside :class:`CudaClock`."""

    def __init__(self, cache_bytes: int) -> None:
        self._buffer = torch.zeros(FLUSH_CACHES * cache_bytes // 4, dtype=torch.float32, device="cuda")
        self._sink = torch.zeros((), dtype=torch.float32, device="cuda")
        self._events: list[tuple[Any, Any]] = []

    def timed(self, launch: Callable[[], None], times: int) -> float:
        """See :class:`Gpu`."""
        while len(self._events) < times:
            self._events.append((_timing_event(), _timing_event()))
        pairs = self._events[:times]
        for start, end in pairs:
            torch.sum(self._buffer, dim=0, out=self._sink)
            start.record()
            launch()
            end.record()
        self.synchronize()
        return 1000.0 * sum(float(start.elapsed_time(end)) for start, end in pairs)

    def capture(self, body: Callable[[], None]) -> tuple[Callable[[], None], Callable[[], None]]:
        """See :class:`Gpu`. Not ``torch.cuda.graph``: that collects garbage and empties the allocator."""
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            body()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay, graph.reset

    def synchronize(self) -> None:
        """See :class:`Gpu`."""
        torch.cuda.current_stream().synchronize()


_Request = tuple[str, "tuple[int, ...]", torch.dtype]


class SameBuffers:
    """An ``allocate`` for several sessions of one route which gives all of them the same buffers.

    The n-th request of a session for a name, shape and dtype gets what the first session got for its n-th.
    Sessions that are prepared alike and run one after the other may share them: all they keep is there.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._made: dict[tuple[_Request, int], torch.Tensor] = {}

    def for_session(self) -> Allocate:
        """The ``allocate`` of one more session."""
        asked: Counter[_Request] = Counter()

        def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            request = (name, tuple(shape), dtype)
            key = (request, asked[request])
            asked[request] += 1
            if key not in self._made:
                self._made[key] = self._allocate(name, shape, dtype)
            return self._made[key]

        return allocate


class CudaStand:
    """One route over all operand sets of a cell; see the module's docstring."""

    def __init__(self, gpu: Gpu, route: Route, pools: Pools, allocate: Allocate) -> None:
        self._gpu = gpu
        self._name = route.name
        self._pools = pools
        self._host_us: float | None = None
        self._checked = self._eager = route.capture is Capture.NO
        self._free: Callable[[], None] | None = None
        buffers = SameBuffers(allocate)
        self._sessions: list[Session] = []
        try:
            # all are opened before any is prepared: opening may clear the buffers that they share
            for _ in pools.sets:
                self._sessions.append(opened(route, pools, buffers.for_session()))
            self._prepare_all()
            self._run_all()  # loads modules and makes whatever is made on first use
            self._launch: Callable[[], None] = self._run_all
            if not self._eager:
                self._launch, self._free = self._captured()
            gpu.synchronize()
        except BaseException:
            with contextlib.suppress(Exception):
                self.close()
            raise

    def measure(self, calls: int) -> GroupTimes:
        """See :class:`autotune.bench.clock.Stand`.

        Raises:
            BenchError: the replayed graph does not compute what an eager launch does.
        """
        sets = self._pools.sets
        start = perf_counter_ns()
        self._prepare()
        prepare_us = (perf_counter_ns() - start) / 1000.0 / (len(sets) if self._eager else 1)
        replays = ceil(calls / len(sets))
        run_us = self._gpu.timed(self._launch, replays) / (replays * len(sets))
        if not self._checked:
            self._checked = True
            self._agree(self._sessions[-1], sets[-1])
        if self._host_us is None or run_us < HIDES_HOST_US:
            self._host_us = self._host_time(self._sessions[-1], sets[-1])
        return GroupTimes(run_us, self._host_us, prepare_us, replays * len(sets))

    def rerun(self) -> list[Launch]:
        """See :class:`autotune.bench.clock.Stand`; one replay of the graph over all sets."""
        sets = self._pools.sets
        for launch in sets:
            poison(launch.out)
        self._prepare()
        self._launch()
        self._gpu.synchronize()
        return sets

    def close(self) -> None:
        """See :class:`autotune.bench.clock.Stand`."""
        sessions, self._sessions = self._sessions, []
        free, self._free = self._free, None
        if free is not None:
            free()
        for session in sessions:
            session.close()

    def _captured(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """A graph of all launches.

        Raises:
            TimingFindingError: the route cannot be captured, though it says that it can.
        """
        try:
            return self._gpu.capture(self._run_all)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            message = " ".join(str(error).split())[:300]
            finding = Finding(self._name, FailureKind.LAUNCH_ERROR, f"cannot be captured: {message}")
            raise TimingFindingError(finding) from error

    def _prepare(self) -> None:
        """What an engine does once a step."""
        if self._eager:
            self._prepare_all()
        else:
            self._sessions[0].prepare(self._pools.sets[0].step)

    def _prepare_all(self) -> None:
        for session, launch in zip(self._sessions, self._pools.sets, strict=True):
            session.prepare(launch.step)

    def _run_all(self) -> None:
        for session, launch in zip(self._sessions, self._pools.sets, strict=True):
            session.run(launch.out)

    def _host_time(self, session: Session, launch: Launch) -> float:
        """Host time of one eager call, the device being idle."""
        start = perf_counter_ns()
        session.run(launch.out)
        taken = (perf_counter_ns() - start) / 1000.0
        self._gpu.synchronize()
        return taken

    def _agree(self, session: Session, launch: Launch) -> None:
        """A graph that reads the lengths of its capture would be timed at the wrong work, and look fine."""
        replayed = launch.out.to(torch.float32, copy=True)
        session.prepare(launch.step)
        session.run(launch.out)
        eager = launch.out.to(torch.float32)
        difference = float(torch.linalg.vector_norm(replayed - eager) / torch.linalg.vector_norm(eager))
        if not difference <= AGREE:
            raise BenchError(
                f"{self._name}: a graph replay with new lengths and an eager launch differ by "
                f"{difference:.3g} of the output: its prepare() does not work in place"
            )


def device_sets(one: int, cache_bytes: int, memory_bytes: int) -> int:
    """Operand sets to rotate through: past twice the cache, at most 16, at least 2 if they fit and are small.

    One set is enough to be right, since the cache is flushed before every replay; more of them let one replay
    hold many launches.

    Args:
        one: bytes of one KV pool.
        memory_bytes: what all pools together may take.

    Raises:
        BenchError: not even one fits.
    """
    fit = memory_bytes // one
    if fit < 1:
        raise BenchError(
            f"one KV pool takes {one / 2**30:.1f} GiB, {max(0, memory_bytes) / 2**30:.1f} GiB are free"
        )
    least = LEAST_SETS if one < ONE_SET_BYTES else 1
    return min(fit, MOST_SETS, max(least, 2 * cache_bytes // one + 1))


@lru_cache(maxsize=8)
def _stream(index: int) -> torch.cuda.Stream:
    """One stream for all cells of a process: torch keeps freed memory per stream."""
    return torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]


# SM clock, in MHz, when this process last finished timing a cell on a device.
_last_sm_mhz: dict[int, int] = {}


class CudaClock:
    """See :class:`autotune.bench.clock.Clock`."""

    shared_metadata = True

    def __init__(self, device: str) -> None:
        index = torch.device(device).index
        self._index = torch.cuda.current_device() if index is None else index
        self.monitor: Monitor = cuda_monitor(self._index)
        self._cache_bytes = int(torch.cuda.get_device_properties(self._index).L2_cache_size)
        self._scope = contextlib.ExitStack()
        self._gpu: TorchGpu | None = None

    def operand_sets(self, cell: Cell, wanted: int, routes: int) -> int:
        """From the cache and the free memory; ``wanted`` is for devices that cannot say."""
        free, _ = torch.cuda.mem_get_info(self._index)
        with contextlib.suppress(RuntimeError):  # a pluggable allocator keeps no statistics
            free += torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        return device_sets(
            pool_bytes(cell), self._cache_bytes, int(free * 0.95) - routes * ROUTE_BYTES - BUILD_BYTES
        )

    def stand(self, route: Route, pools: Pools, allocate: Allocate) -> CudaStand:
        """See :class:`autotune.bench.clock.Clock`."""
        assert self._gpu is not None, "a clock is entered before it is used"
        return CudaStand(self._gpu, route, pools, allocate)

    def warm(self) -> bool:
        """The SM clock is where it was when this process last finished a cell; False without NVML."""
        reading, last = self.monitor.read(), _last_sm_mhz.get(self._index)
        if reading is None or reading.sm_mhz is None or last is None:
            return False
        return reading.sm_mhz >= WARM_SHARE * last

    def __enter__(self) -> CudaClock:
        self._scope.enter_context(torch.cuda.device(self._index))
        stream = _stream(self._index)
        stream.wait_stream(torch.cuda.current_stream())
        self._scope.enter_context(torch.cuda.stream(stream))
        self._gpu = TorchGpu(self._cache_bytes)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gpu = None
        with self._scope:
            if kind is not None:
                return  # after a device error every call fails; the first error is the one to tell
            torch.cuda.current_stream().synchronize()
            reading = self.monitor.read()
            if reading is not None and reading.sm_mhz is not None:
                _last_sm_mhz[self._index] = reading.sm_mhz
            with contextlib.suppress(RuntimeError):  # a pluggable allocator keeps no statistics
                if torch.cuda.memory_reserved(self._index) > KEEP_BYTES:
                    torch.cuda.empty_cache()


__all__ = ["CudaClock", "CudaStand", "Gpu", "SameBuffers", "TorchGpu", "device_sets"]
