"""How one route's group of calls is timed on a kind of device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

import torch

from autotune.bench.record import Finding
from autotune.checks.blame import excused, told
from autotune.checks.poison import poison
from autotune.domain.verdict import FailureKind

if TYPE_CHECKING:
    from types import TracebackType

    from autotune.bench.conditions import Monitor
    from autotune.bench.pools import Pools
    from autotune.domain.cell import Cell
    from autotune.routes.base import Allocate, Route, Session, Step


class BenchError(RuntimeError):
    """Timing could not be done: a reason for "no answer", never an accusation."""


class TimingFindingError(Exception):
    """An accusation of a route, met while it was timed."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"{finding.route}: {finding.detail}")
        self.finding = finding


@contextmanager
def accusing(route: str, device: str) -> Iterator[None]:
    """Round a launch of ``route``: an exception becomes a ``launch_error``, unless it says nothing of it.

    Raises:
        TimingFindingError: ``launch_error``.
        RuntimeError: a device error, whatever the exception that it surfaced as.
    """
    try:
        yield
    except (BenchError, TimingFindingError):
        raise
    except Exception as error:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        if excused(error):
            raise
        raise TimingFindingError(
            Finding(route, FailureKind.LAUNCH_ERROR, told("a launch while timing", error))
        ) from error


def opened(route: Route, pools: Pools, allocate: Allocate) -> Session:
    """A session of ``route`` for ``pools``.

    Raises:
        BenchError: it cannot be opened: nothing was launched, nobody is accused.
    """
    try:
        return route.open(pools.capacity, allocate)
    except Exception as error:
        if excused(error):
            raise
        raise BenchError(told(f"{route.name}: open for timing", error)) from error


@dataclass(slots=True, repr=False)
class Launch:
    """Operands of one timed call."""

    step: Step
    out: torch.Tensor

    def __repr__(self) -> str:
        return f"Launch({self.step}, out {tuple(self.out.shape)})"  # no contents: their memory may be gone


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Mean times per call, in microseconds, and how many calls the group had."""

    run_us: float
    host_us: float
    prepare_us: float
    calls: int


class Stand(Protocol):
    """One route in one cell, opened and ready to be timed again and again."""

    def measure(self, calls: int) -> GroupTimes:
        """Prepare and run the route at least ``calls`` times on the round's lengths.

        When it returns, no work of the group is pending on the device, and an error of the device has been
        raised.
        """

    def rerun(self) -> list[Launch]:
        """Prepare and launch once more as it is timed, but untimed and over poisoned outputs.

        Returns:
            The operand sets that were launched on, that for which the route was prepared first. They are the
            same for all stands until the next round. Nothing is pending on the device.
        """

    def close(self) -> None:
        """Drop sessions, graphs and buffers."""


class Clock(Protocol):
    """Times routes on one kind of device. Entered for the length of one cell.

    Attributes:
        shared_metadata: operand sets share one page table and one tensor of lengths.
        monitor: reads the device's clocks and temperatures.
    """

    shared_metadata: bool
    monitor: Monitor

    def operand_sets(self, cell: Cell, wanted: int, routes: int) -> int:
        """How many operand sets to rotate through; ``wanted`` is the setting.

        Raises:
            BenchError: the device's memory does not hold them.
        """

    def stand(self, route: Route, pools: Pools, allocate: Allocate) -> Stand:
        """Open ``route`` for ``pools``."""

    def warm(self) -> bool:
        """Whether the device still runs as it did when this process last timed a cell."""

    def __enter__(self) -> Clock: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class HostStand:
    """Kernels that run in the calling thread: a call's host time is its run time."""

    def __init__(
        self, session: Session, take: Callable[[int], list[Launch]], latest: Callable[[], Launch]
    ) -> None:
        self._session = session
        self._take = take
        self._latest = latest

    def measure(self, calls: int) -> GroupTimes:
        """See :class:`Stand`; every call is prepared, since each set has a page table of its own."""
        preparing = running = 0
        for launch in self._take(calls):
            start = perf_counter_ns()
            self._session.prepare(launch.step)
            prepared = perf_counter_ns()
            self._session.run(launch.out)
            running += perf_counter_ns() - prepared
            preparing += prepared - start
        run_us = running / calls / 1000.0
        return GroupTimes(run_us, run_us, preparing / calls / 1000.0, calls)

    def rerun(self) -> list[Launch]:
        """See :class:`Stand`."""
        launch = self._latest()
        poison(launch.out)
        self._session.prepare(launch.step)
        self._session.run(launch.out)
        return [launch]

    def close(self) -> None:
        """See :class:`Stand`."""
        self._session.close()


class HostClock:
    """The clock of CPU kernels."""

    shared_metadata = False

    def __init__(self) -> None:
        from autotune.bench.conditions import NoMonitor

        self.monitor: Monitor = NoMonitor()

    def operand_sets(self, cell: Cell, wanted: int, routes: int) -> int:
        """As many as the settings say."""
        return wanted

    def stand(self, route: Route, pools: Pools, allocate: Allocate) -> Stand:
        """See :class:`Clock`."""
        return HostStand(opened(route, pools, allocate), pools.take, pools.latest)

    def warm(self) -> bool:
        """Never taken for granted: other programs use the same cores."""
        return False

    def __enter__(self) -> HostClock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def clock_for(device: str) -> Clock:
    """The clock of a torch device string.

    Raises:
        BenchError: no clock for this kind of device.
    """
    kind = device.partition(":")[0]
    if kind == "cpu":
        return HostClock()
    if kind == "cuda":
        from autotune.bench.cuda_clock import CudaClock

        return CudaClock(device)
    raise BenchError(f"no clock for device {device!r}; there is one for: cpu, cuda")
