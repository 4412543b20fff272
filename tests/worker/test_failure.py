from __future__ import annotations

import errno
import json
import signal

import pytest

from autotune.arena.base import ArenaError
from autotune.bench.clock import BenchError
from autotune.domain.verdict import FailureKind, UnprovenReason
from autotune.routes.contract import ContractError
from autotune.worker.base import ProtocolError
from autotune.worker.failure import FaultSite, classify, judge_death, match, parse_fault

OPEN = "reference/tail: open for 4 rows, 9 pages"
INSIDE = FaultSite("SIGSEGV", 0x7F0000001000, True, "kv_cache", 16)
OUTSIDE = FaultSite("SIGSEGV", 0x10, False)


@pytest.mark.parametrize(
    ("text", "blame", "sticky"),
    [
        ("CUDA error: an illegal memory access was encountered", FailureKind.ILLEGAL_ACCESS, True),
        ("CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS", FailureKind.ILLEGAL_ACCESS, True),
        ("operation not supported on global/shared address space", FailureKind.ILLEGAL_ACCESS, True),
        ("CUDA error: misaligned address", FailureKind.MISALIGNED, True),
        ("an illegal instruction was encountered", FailureKind.ILLEGAL_INSTRUCTION, True),
        ("invalid program counter", FailureKind.ILLEGAL_INSTRUCTION, True),
        ("the launch timed out and was terminated", FailureKind.HANG, True),
        ("CUDA error: unspecified launch failure", FailureKind.LAUNCH_ERROR, True),
        ("CUDA error: device-side assert triggered", FailureKind.LAUNCH_ERROR, True),
        ("too many resources requested for launch", FailureKind.LAUNCH_ERROR, False),
        ("CUDA error: invalid configuration argument", FailureKind.LAUNCH_ERROR, False),
        ("uncorrectable ECC error encountered", UnprovenReason.INFRASTRUCTURE, True),
        ("CUDA error: unknown error", UnprovenReason.INFRASTRUCTURE, True),
        ("CUDA out of memory. Tried to allocate 20.00 GiB", UnprovenReason.OUT_OF_MEMORY, False),
        ("CUDA error: out of memory", UnprovenReason.OUT_OF_MEMORY, False),
        ("DefaultCPUAllocator: can't allocate memory: you tried", UnprovenReason.OUT_OF_MEMORY, False),
        ("DefaultCPUAllocator: not enough memory: you tried", UnprovenReason.OUT_OF_MEMORY, False),
        ("no kernel image is available for execution", UnprovenReason.INFRASTRUCTURE, True),
        (
            "MissingJITCacheError: JIT compilation is disabled via FLASHINFER_DISABLE_JIT",
            UnprovenReason.INFRASTRUCTURE,
            True,
        ),
        ("all CUDA-capable devices are busy or unavailable", UnprovenReason.INFRASTRUCTURE, True),
        ("python: symbol lookup error: x.so: undefined symbol: f", UnprovenReason.INFRASTRUCTURE, False),
    ],
)
def test_error_messages(text: str, blame: object, sticky: bool) -> None:
    found = match(f"prefix {text}\nsuffix")
    assert found is not None
    assert (found.blame, found.sticky) == (blame, sticky)


@pytest.mark.parametrize("text", ["", "q must be contiguous", "shape mismatch", "room out of order"])
def test_unknown_messages_blame_nobody(text: str) -> None:
    assert match(text) is None
    assert classify(RuntimeError(text), "") is None


@pytest.mark.parametrize(
    ("status", "step", "fault", "output", "blame"),
    [
        (-signal.SIGSEGV, "launch", INSIDE, "", FailureKind.ILLEGAL_ACCESS),
        (-signal.SIGBUS, "launch", INSIDE, "", FailureKind.ILLEGAL_ACCESS),
        (-signal.SIGSEGV, "launch", OUTSIDE, "", FailureKind.CRASH),
        (-signal.SIGSEGV, "launch", None, "", FailureKind.CRASH),
        (-signal.SIGILL, "launch", None, "", FailureKind.ILLEGAL_INSTRUCTION),
        (-signal.SIGABRT, "launch", None, "free(): invalid pointer", FailureKind.CRASH),
        (-signal.SIGFPE, "launch", None, "", FailureKind.CRASH),
        (7, "launch", None, "", FailureKind.CRASH),
        (0, "launch", None, "", FailureKind.CRASH),
        # Not the kernel's doing, or not known to be
        (-signal.SIGKILL, "launch", None, "", UnprovenReason.INFRASTRUCTURE),
        (-signal.SIGTERM, "launch", None, "", UnprovenReason.INFRASTRUCTURE),
        (-64, "launch", None, "", UnprovenReason.INFRASTRUCTURE),
        (127, "launch", None, "", UnprovenReason.INFRASTRUCTURE),
        (255, "launch", None, "", UnprovenReason.INFRASTRUCTURE),
        (1, "launch", None, "x: undefined symbol: y", UnprovenReason.INFRASTRUCTURE),
        (-signal.SIGABRT, "launch", None, "what():  std::bad_alloc", UnprovenReason.OUT_OF_MEMORY),
        # Outside any launch nobody is accused
        (-signal.SIGSEGV, "", OUTSIDE, "", UnprovenReason.INFRASTRUCTURE),
        (-signal.SIGSEGV, "", INSIDE, "", UnprovenReason.INFRASTRUCTURE),
        (7, "", None, "", UnprovenReason.INFRASTRUCTURE),
    ],
)
def test_deaths(status: int, step: str, fault: FaultSite | None, output: str, blame: object) -> None:
    assert judge_death(status, step, fault, output).blame is blame


def test_a_fault_in_our_hole_needs_no_excuse() -> None:
    judged = judge_death(-signal.SIGSEGV, "launch", INSIDE, "warning: out of memory, retrying")
    assert judged.blame is FailureKind.ILLEGAL_ACCESS


def test_a_death_says_what_was_seen() -> None:
    text = judge_death(-signal.SIGSEGV, "launch", INSIDE, "first\n\n  last words \n\n").detail
    assert text == "SIGSEGV, kv_cache: 16 bytes past the end; last output: last words"
    assert judge_death(-signal.SIGSEGV, "launch", OUTSIDE, "").detail == "SIGSEGV, address 0x10"
    assert "exit status 127, the mark of a missing" in judge_death(127, "launch", None, "").detail
    assert judge_death(-99, "launch", None, "").detail.startswith("signal 99")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), UnprovenReason.OUT_OF_MEMORY),
        (ArenaError("no address space"), UnprovenReason.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), UnprovenReason.OUT_OF_MEMORY),
        (ModuleNotFoundError("No module named 'flashinfer'"), UnprovenReason.INFRASTRUCTURE),
        (BenchError("the graph cannot be captured"), UnprovenReason.INFRASTRUCTURE),
        (ContractError("page_size", "48 is not taken"), UnprovenReason.INFRASTRUCTURE),
        (ProtocolError("another job"), UnprovenReason.INFRASTRUCTURE),
    ],
)
def test_errors_that_are_ours(error: Exception, reason: UnprovenReason) -> None:
    for step in ("launch", OPEN, ""):
        judged = classify(error, step)
        assert judged is not None
        assert judged.blame is reason
        assert "\n" not in judged.detail
        assert judged.detail


def test_a_device_error_accuses_only_inside_a_launch() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    inside, opening, outside = classify(error, "launch"), classify(error, OPEN), classify(error, "")
    assert inside is not None
    assert opening is not None
    assert outside is not None
    assert inside.blame is opening.blame is FailureKind.ILLEGAL_ACCESS
    assert outside.blame is UnprovenReason.INFRASTRUCTURE
    # the process is spoilt either way
    assert inside.sticky and opening.sticky and outside.sticky


@pytest.mark.parametrize(
    "error", [ValueError("q has 3 dims"), SystemExit(1), KeyError("plan"), RuntimeError()]
)
def test_what_a_route_raises_accuses_it_in_a_launch_and_not_while_it_is_opened(error: BaseException) -> None:
    launch, opening, closing = (classify(error, step) for step in ("launch", OPEN, "reference/tail: close"))
    assert launch is not None
    assert opening is not None
    assert launch.blame is FailureKind.LAUNCH_ERROR
    assert launch.detail.startswith(f"raised {type(error).__name__}")
    assert opening.blame is UnprovenReason.INFRASTRUCTURE
    assert opening.detail.startswith(f"nothing was launched: {type(error).__name__}")
    assert closing == launch
    assert not launch.sticky


def test_an_unknown_error_of_the_device_spoils_the_process() -> None:
    error = RuntimeError("CUDA error: invalid argument")
    blames = {}
    for step in ("launch", OPEN, ""):
        found = classify(error, step)
        assert found is not None
        assert found.sticky
        blames[step] = found.blame
    infrastructure = UnprovenReason.INFRASTRUCTURE
    assert blames == {"launch": FailureKind.LAUNCH_ERROR, OPEN: infrastructure, "": infrastructure}


def test_parse_fault_takes_the_first_complete_line() -> None:
    line = {"signal": "SIGBUS", "address": 4096, "inside_hole": True, "operand": "q", "offset": -4}
    text = b"\x00garbage\n" + json.dumps(line).encode() + b'\n{"signal": 7'
    assert parse_fault(text) == FaultSite("SIGBUS", 4096, True, "q", -4)
    assert parse_fault(b"") is None
    assert parse_fault(b'{"signal": 11}\n[]\n') is None
