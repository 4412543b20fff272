"""The failure taxonomy: from a death, an exception or an error message to who is to blame.

Rules: a kernel is accused (``FailureKind``) only for what happened in a journalled step, and only if
nothing else explains it. Whatever an operator, the OOM killer, the loader or a missing library may have
caused is an ``UnprovenReason``.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from errno import ENOMEM, ENOSPC

from autotune.arena import regions
from autotune.arena.base import ArenaError
from autotune.domain.verdict import FailureKind, UnprovenReason

Blame = FailureKind | UnprovenReason

# How steps are journalled that open and close a session: such a step makes no launch.
OPENING, CLOSING = ": open for ", ": close"

_OURS = "autotune."
_OF_THE_DEVICE = re.compile(r"CUDA error|CUDA driver error|cudaError|CUDA_ERROR_", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FaultSite:
    """Where an access faulted, as the arena's signal handler wrote it down.

    Attributes:
        signal: the signal's name.
        address: 0 for a signal that was sent rather than caused by an access.
        inside_hole: the address lies in inaccessible memory that an arena reserved round its operands.
        operand: that operand's name, if inside.
        offset: 0 is the first byte past the operand's end, -1 the last byte before its start.
    """

    signal: str
    address: int
    inside_hole: bool
    operand: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        if self.operand is None or self.offset is None:
            return f"address {self.address:#x}"
        return str(regions.FaultSite(self.operand, self.offset))


@dataclass(frozen=True, slots=True)
class Judgement:
    """Who is to blame, and why, in one line."""

    blame: Blame
    detail: str


@dataclass(frozen=True, slots=True)
class Classified(Judgement):
    """What an exception means.

    ``sticky``: every later call in the process fails too, so it must be replaced.
    """

    sticky: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """What an error message means.

    ``sticky``: every later call in the process fails too, so it must be replaced.
    """

    pattern: re.Pattern[str]
    blame: Blame
    sticky: bool


def _message(pattern: str, blame: Blame, sticky: bool) -> Message:
    return Message(re.compile(pattern, re.IGNORECASE), blame, sticky)


# The CUDA runtime's and driver's texts (cudaGetErrorString, cuGetErrorName), as torch, FlashInfer and
# cuda-bindings quote them. First match wins.
MESSAGES = (
    _message(
        r"illegal memory access|CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorIllegalAddress",
        FailureKind.ILLEGAL_ACCESS,
        True,
    ),
    _message(
        r"not supported on global/shared address space|CUDA_ERROR_INVALID_ADDRESS_SPACE|"
        r"cudaErrorInvalidAddressSpace",
        FailureKind.ILLEGAL_ACCESS,
        True,
    ),
    _message(
        r"misaligned address|CUDA_ERROR_MISALIGNED_ADDRESS|cudaErrorMisalignedAddress",
        FailureKind.MISALIGNED,
        True,
    ),
    _message(
        r"illegal instruction was encountered|CUDA_ERROR_ILLEGAL_INSTRUCTION|cudaErrorIllegalInstruction",
        FailureKind.ILLEGAL_INSTRUCTION,
        True,
    ),
    _message(
        r"invalid program counter|CUDA_ERROR_INVALID_PC|cudaErrorInvalidPc",
        FailureKind.ILLEGAL_INSTRUCTION,
        True,
    ),
    _message(
        r"launch timed out and was terminated|CUDA_ERROR_LAUNCH_TIMEOUT|cudaErrorLaunchTimeout",
        FailureKind.HANG,
        True,
    ),
    _message(
        r"unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED|cudaErrorLaunchFailure|hardware stack error|"
        r"CUDA_ERROR_HARDWARE_STACK_ERROR|device-side assert|CUDA_ERROR_ASSERT|cudaErrorAssert",
        FailureKind.LAUNCH_ERROR,
        True,
    ),
    _message(
        r"too many resources requested for launch|CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES|"
        r"cudaErrorLaunchOutOfResources|invalid configuration argument|cudaErrorInvalidConfiguration",
        FailureKind.LAUNCH_ERROR,
        False,
    ),
    _message(
        r"uncorrectable (ecc|nvlink) error|CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorECCUncorrectable|"
        r"CUDA_ERROR_NVLINK_UNCORRECTABLE|unknown error|CUDA_ERROR_UNKNOWN|cudaErrorUnknown",
        UnprovenReason.INFRASTRUCTURE,
        True,
    ),
    _message(
        r"CUDA out of memory|\bout of memory\b|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|"
        r"DefaultCPUAllocator: (not enough|can't allocate) memory|cannot allocate memory|std::bad_alloc|"
        r"\bMemoryError\b",
        UnprovenReason.OUT_OF_MEMORY,
        False,
    ),
    _message(
        r"MissingJITCacheError|JIT compilation is disabled|"
        r"no kernel image is available|invalid device function|device kernel image is invalid|"
        r"PTX was compiled with an unsupported toolchain|busy or unavailable|system not yet initialized|"
        r"driver version is insufficient|no CUDA-capable device|driver shutting down",
        UnprovenReason.INFRASTRUCTURE,
        True,
    ),
    _message(
        r"symbol lookup error|undefined symbol|cannot open shared object file",
        UnprovenReason.INFRASTRUCTURE,
        False,
    ),
)

# What the dying process wrote that explains its death better than its exit status.
_EXCULPATING = tuple(message for message in MESSAGES if isinstance(message.blame, UnprovenReason))

_KERNEL_SIGNALS = {
    signal.SIGSEGV: FailureKind.CRASH,
    signal.SIGBUS: FailureKind.CRASH,
    signal.SIGILL: FailureKind.ILLEGAL_INSTRUCTION,
    signal.SIGABRT: FailureKind.CRASH,
    signal.SIGFPE: FailureKind.CRASH,
    signal.SIGTRAP: FailureKind.CRASH,
}

# How a child ends that could not go on for a reason of its own, whatever step was journalled last.
OURS_STATUS = 125
# The loader's and the shell's "could not run it"; 255 is also what multiprocessing reports when it lost
# the exit status with the fork server.
_INFRASTRUCTURE_STATUS = {
    OURS_STATUS: "a child that could not go on",
    126: "a program that cannot be executed",
    127: "a missing program, library or symbol",
    255: "a lost exit status, or exit(-1)",
}


def match(text: str) -> Message | None:
    """The first known error message in ``text``."""
    return next((message for message in MESSAGES if message.pattern.search(text)), None)


def is_opening(step: str) -> bool:
    """Whether a journalled step only sets a route up: nothing has been launched yet."""
    return OPENING in step


def is_closing(step: str) -> bool:
    """Whether a journalled step only takes a route down."""
    return step.endswith(CLOSING)


def classify(error: BaseException, step: str) -> Classified | None:
    """Who is to blame for a Python exception; the one answer for checks, timing and the child.

    An error that the device reports accuses in every step. Any other exception accuses a launch only: while
    a session is opened nothing has run, and a library that refuses to be set up has harmed nobody. What this
    package raises itself (``ArenaError``, ``BenchError``, ...; ``ContractError``, which checks turn into a
    refusal first) accuses nobody.

    Args:
        step: the journalled step that it was raised in; "" for our own code.

    Returns:
        None: our own code raised something that no table knows.
    """
    lines = f"{type(error).__name__}: {error}".splitlines()
    text = lines[0].rstrip(": ")[:300]
    if isinstance(error, MemoryError | ArenaError):
        return Classified(UnprovenReason.OUT_OF_MEMORY, text)
    if isinstance(error, OSError) and error.errno in (ENOMEM, ENOSPC):
        return Classified(UnprovenReason.OUT_OF_MEMORY, text)
    if isinstance(error, ImportError) or type(error).__module__.startswith(_OURS):
        return Classified(UnprovenReason.INFRASTRUCTURE, text)
    known = match(str(error))
    if known is not None:
        if isinstance(known.blame, FailureKind) and not step:
            return Classified(UnprovenReason.INFRASTRUCTURE, f"outside any launch: {text}", known.sticky)
        return Classified(known.blame, text, known.sticky)
    # an error of the device that the table lacks may stay: the process is replaced to be safe
    sticky = any(cls.__name__ == "AcceleratorError" for cls in type(error).__mro__) or (
        _OF_THE_DEVICE.search(str(error)) is not None
    )
    if not step:
        return (
            Classified(UnprovenReason.INFRASTRUCTURE, f"outside any launch: {text}", sticky)
            if sticky
            else None
        )
    if is_opening(step):
        return Classified(UnprovenReason.INFRASTRUCTURE, f"nothing was launched: {text}", sticky)
    return Classified(FailureKind.LAUNCH_ERROR, f"raised {text}", sticky)


def judge_death(status: int, step: str, fault: FaultSite | None, output: str) -> Judgement:
    """Who is to blame for a process that ended on its own.

    Args:
        status: exit status; minus the signal's number if a signal ended it.
        step: the journalled step, or "" if our own code was running.
        output: the end of its stdout and stderr.
    """
    last_words = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    said = f"; last output: {last_words[:200]}" if last_words else ""
    seen = f"{describe_status(status)}{f', {fault}' if fault else ''}{said}"
    excuse = next((message for message in _EXCULPATING if message.pattern.search(output)), None)
    # A fault that was located in our own hole needs no other explanation.
    if fault is not None and fault.inside_hole and step:
        return Judgement(FailureKind.ILLEGAL_ACCESS, seen)
    if excuse is not None:
        return Judgement(excuse.blame, seen)
    if not step:
        return Judgement(UnprovenReason.INFRASTRUCTURE, f"outside any launch: {seen}")
    if status < 0:
        kind = _KERNEL_SIGNALS.get(-status)  # type: ignore[call-overload]
        if kind is None:
            return Judgement(
                UnprovenReason.INFRASTRUCTURE, f"{seen}: killed from outside (OOM killer, operator)"
            )
        return Judgement(kind, seen)
    if status in _INFRASTRUCTURE_STATUS:
        return Judgement(
            UnprovenReason.INFRASTRUCTURE, f"{seen}, the mark of {_INFRASTRUCTURE_STATUS[status]}"
        )
    return Judgement(FailureKind.CRASH, seen)


def describe_status(status: int) -> str:
    """``SIGSEGV`` or ``exit status 7``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def parse_fault(data: bytes) -> FaultSite | None:
    """The first complete line that the arena's signal handler wrote, or None."""
    for line in data.splitlines():
        try:
            fields = json.loads(line)
            return FaultSite(
                signal=str(fields["signal"]),
                address=int(fields["address"]),
                inside_hole=bool(fields["inside_hole"]),
                operand=fields.get("operand"),
                offset=fields.get("offset"),
            )
        except (ValueError, TypeError, KeyError):
            continue
    return None
