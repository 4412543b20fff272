"""Whom an exception accuses that comes out of a route's call.

One that the route raises for a legal call is ``launch_error``. Running out of memory, or of address space, a
library that cannot be loaded and a session that cannot be opened are ``unproven`` and accuse nobody. CUDA's
errors are asynchronous, stick to the process and often surface under another name: every step waits for the
device before it ends, so that a fault belongs to its launch, and whatever the device then reports is raised
on. The worker names it and replaces the process, as for a signal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOMEM, ENOSPC
from typing import TYPE_CHECKING

import torch

from autotune.arena import cuda_allocator
from autotune.arena.base import ArenaError
from autotune.domain.verdict import FailureKind
from autotune.routes.contract import ContractError

if TYPE_CHECKING:
    from autotune.checks.base import Trial

# What the CUDA runtime, the driver and the libraries that quote them say of an error that stays.
_STICKY = re.compile(
    r"CUDA error|cudaError|CUDA_ERROR_|illegal memory access|misaligned address|illegal instruction|"
    r"unspecified launch failure|device-side assert",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(
    r"\bout of memory\b|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|cannot allocate memory|"
    r"DefaultCPUAllocator: (not enough|can't allocate) memory|std::bad_alloc",
    re.IGNORECASE,
)
# What says that a library or its build does not fit the machine, whatever the exception's type.
_UNFIT = re.compile(
    r"MissingJITCacheError|JIT compilation is disabled|"
    r"no kernel image is available|invalid device function|device kernel image is invalid|"
    r"PTX was compiled with an unsupported toolchain|symbol lookup error|undefined symbol|"
    r"cannot open shared object file|busy or unavailable|system not yet initialized|"
    r"driver version is insufficient|no CUDA-capable device|driver shutting down",
    re.IGNORECASE,
)


class FindingError(Exception):
    """A check's accusation; ends its run."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class OperandsError(RuntimeError):
    """A check's own operands break the contract of a call: nothing was launched, nobody is accused."""


class UnfitError(RuntimeError):
    """A session cannot be opened, or a library does not fit the machine: nobody is accused."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that there was no memory: the host's, or the device's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno in (ENOMEM, ENOSPC):
        return True
    # the CPU allocator has no exception type of its own, nor have libraries
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def is_device_error(error: BaseException) -> bool:
    """Whether ``error`` is a sticky error of the accelerator, after which the process is worth nothing."""
    accelerator = getattr(torch, "AcceleratorError", None)  # torch >= 2.8
    if accelerator is not None and isinstance(error, accelerator):
        return True
    return isinstance(error, RuntimeError) and _STICKY.search(str(error)) is not None


def is_unfit(error: BaseException) -> bool:
    """Whether ``error`` says that a library, or what it was built for, does not fit the machine."""
    return isinstance(error, ImportError) or _UNFIT.search(str(error)) is not None


def excused(error: BaseException) -> bool:
    """Whether an exception out of a route's call says nothing about the kernel by itself."""
    ours = isinstance(error, (ArenaError, ContractError))
    return ours or is_out_of_memory(error) or is_device_error(error) or is_unfit(error)


def told(what: str, error: BaseException) -> str:
    """An exception in one line."""
    message = " ".join(str(error).split()) or "no message"
    return f"{what} raised {type(error).__name__}: {message[:300]}"


@contextmanager
def calling(trial: Trial, what: str, *, opening: bool = False) -> Iterator[None]:
    """Journal a step of the route and wait for its end on the device.

    An exception becomes a ``launch_error``, unless it is not the route's fault. What the route allocates
    through torch meanwhile is guarded, where the process has the allocator for it.

    Args:
        opening: nothing is launched yet, so that an exception accuses nobody.

    Raises:
        FindingError: ``launch_error``.
        UnfitError: an exception while opening.
        RuntimeError: a device error, whatever the exception that it surfaced as.
    """
    trial.launched(what)
    on_device = trial.device != "cpu"
    try:
        with cuda_allocator.guarding():
            yield
        if on_device:
            torch.cuda.synchronize(trial.device)
        trial.launched("")  # nothing of the route runs any more: until the next step it is our own code
    except Exception as error:
        if on_device:
            torch.cuda.synchronize(trial.device)
        if is_unfit(error) and not is_device_error(error):
            raise UnfitError(told(what, error)) from error
        if excused(error):
            raise
        if opening:
            raise UnfitError(told(what, error)) from error
        raise FindingError(FailureKind.LAUNCH_ERROR, told(what, error)) from error
