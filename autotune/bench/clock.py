"""How one route's group of calls is timed on a kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from autotune.routes.base import Session, Step


class BenchError(RuntimeError):
    """Timing could not be done: a reason for "no answer", never an accusation."""


@dataclass(slots=True)
class Launch:
    """Operands of one timed call."""

    step: Step
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Mean times per call, in microseconds."""

    run_us: float
    host_us: float
    prepare_us: float


class Clock(Protocol):
    """Times a group of calls of one route: one per kind of device."""

    def measure(self, session: Session, group: Sequence[Launch]) -> GroupTimes:
        """Prepare and run ``session`` once per element of ``group``, in order.

        When it returns, no work of the group is pending on the device.
        """


class HostClock:
    """Kernels that run in the calling thread: a call's host time is its run time."""

    def measure(self, session: Session, group: Sequence[Launch]) -> GroupTimes:
        """See :class:`Clock`."""
        preparing = running = 0
        for launch in group:
            start = perf_counter_ns()
            session.prepare(launch.step)
            prepared = perf_counter_ns()
            session.run(launch.out)
            running += perf_counter_ns() - prepared
            preparing += prepared - start
        run_us = running / len(group) / 1000.0
        return GroupTimes(run_us=run_us, host_us=run_us, prepare_us=preparing / len(group) / 1000.0)


def clock_for(device: str) -> Clock:
    """The clock of a torch device string.

    Raises:
        BenchError: no clock for this kind of device.
    """
    kind = device.partition(":")[0]
    if kind != "cpu":
        raise BenchError(f"no clock for device {device!r}; there is one for: cpu")
    return HostClock()
