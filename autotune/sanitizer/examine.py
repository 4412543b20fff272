"""One stored proof under compute-sanitizer, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from autotune.domain.verdict import FailureKind
from autotune.sanitizer.process import capture
from autotune.sanitizer.report import Report, parse
from autotune.sanitizer.tool import NAME, command, environment
from autotune.worker.pin import pin

if TYPE_CHECKING:
    from pathlib import Path

    from autotune.sanitizer.finding import Finding
    from autotune.sanitizer.process import Captured

# Failures that an access to memory may explain.
MEMORY = frozenset(
    {
        FailureKind.ILLEGAL_ACCESS,
        FailureKind.MISALIGNED,
        FailureKind.OUT_OF_BOUNDS_WRITE,
        FailureKind.CRASH,
    }
)
# A proof of one check takes 7 to 8 s under the tool on an H200, nearly all of it imports.
TIMEOUT_S = 120.0
# How a note begins: whoever reads a row's detail, and a later run that must not look again, find it by this.
MARK = "sanitizer: "
_MOST_COMPLAINT = 160


class Ended(str, Enum):
    """How a look ended."""

    FOUND = "found"
    NOTHING = "nothing"  # the proof ran to its end and the tool had nothing to report
    LATE = "late"
    FAILED = "failed"  # the tool did not get through this one
    REFUSED = "refused"  # the tool does not work on this machine: no use in trying again


@dataclass(frozen=True, slots=True)
class Examined:
    """What one look came to.

    Attributes:
        first: the first invalid access, where one was found.
        errors: how many the tool counts.
        said: why there is no answer, in one line; "" where there is one.
    """

    ended: Ended
    first: Finding | None = None
    errors: int = 0
    said: str = ""

    @property
    def note(self) -> str:
        """What is told beside the verdict: ``sanitizer: invalid global read of 4 bytes ...``."""
        if self.first is None:
            return f"{MARK}{self.said or 'no finding'}"
        more = f"; {self.errors:,} errors in all" if self.errors > 1 else ""
        return f"{MARK}{self.first}{more}"


def examine(tool: Path, repro: str, *, timeout_s: float = TIMEOUT_S, device: str = "cuda") -> Examined:
    """Run ``repro`` (a stored ``autotune prove`` command) under ``tool``. Takes seconds; needs the device.

    Args:
        device: ``cuda:1`` runs it on that one of several.

    Raises:
        ValueError: ``repro`` is no such command.
    """
    words = command(tool, repro)
    env = environment(repro, timeout_s)
    pin(device, env)
    try:
        captured = capture(words, env, timeout_s)
    except OSError as error:
        return Examined(Ended.REFUSED, said=f"{tool} cannot be run ({error.strerror or error})")
    return judge(captured, parse(captured.output), timeout_s)


def judge(captured: Captured, report: Report, timeout_s: float) -> Examined:
    """What a run's end and report amount to. A finding counts however the run ended."""
    if report.first is not None:
        return Examined(Ended.FOUND, report.first, report.errors)
    complaint = report.complaint[:_MOST_COMPLAINT].rstrip()
    if "not supported" in complaint:
        return Examined(Ended.REFUSED, said=f"{NAME} does not work on this device: {complaint}")
    if captured.late:
        return Examined(Ended.LATE, said=f"not finished in {timeout_s:.0f} s")
    if captured.flooded:
        return Examined(Ended.FAILED, said=f"{NAME} was ended: too much output")
    if not report.began:
        last = next((line.strip() for line in reversed(captured.output.splitlines()) if line.strip()), "")
        said = f"; last output: {last[:_MOST_COMPLAINT]}" if last else ""
        return Examined(Ended.REFUSED, said=f"{NAME} ended with status {captured.status}, no report{said}")
    if complaint:
        return Examined(Ended.FAILED, said=f"{NAME}: {complaint}")
    return Examined(Ended.NOTHING)
