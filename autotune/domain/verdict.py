"""Verdicts, the failure taxonomy, and the rule that turns check results into a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from math import isnan
from typing import Any


class Status(str, Enum):
    """What is known of one route in one column."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    UNSUPPORTED = "unsupported"
    REFUSED = "refused"
    UNPROVEN = "unproven"


class FailureKind(str, Enum):
    """How an ``unsafe`` route failed. Every one of these accuses the kernel."""

    ILLEGAL_ACCESS = "illegal_access"
    MISALIGNED = "misaligned"
    ILLEGAL_INSTRUCTION = "illegal_instruction"
    LAUNCH_ERROR = "launch_error"
    HANG = "hang"
    CRASH = "crash"
    WRONG_OUTPUT = "wrong_output"
    NAN_LEAK = "nan_leak"
    UNWRITTEN_OUTPUT = "unwritten_output"
    OUT_OF_BOUNDS_WRITE = "out_of_bounds_write"
    NONDETERMINISTIC = "nondeterministic"


class UnprovenReason(str, Enum):
    """Why nothing is known. None of these accuses the kernel.

    A run tries again what it could not find out, but for ``unclear``: a death that may have been another
    route's and did not come again. Passing at last would not show that it was; a person looks at it.
    """

    BUDGET = "budget"
    OUT_OF_MEMORY = "out_of_memory"
    INFRASTRUCTURE = "infrastructure"
    UNCLEAR = "unclear"


class Requirement(str, Enum):
    """What an engine must attest before a ``safe`` verdict applies to it."""

    FINITE_POOL = "finite_pool"
    TAIL_PADDING_512 = "tail_padding_512"


class CheckStatus(str, Enum):
    """Outcome of one check of one route in one column."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"
    REFUSED = "refused"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One stored proof row, less its keys.

    Attributes:
        launches: kernel launches whose result was examined.
        worst_error: largest error of any (row, head), as ``checks.oracle`` defines it; None if not measured.
        seed: reproduces the operands exactly.
        placements: operand placements that were exercised (``tail``, ``head``).
        slack: bytes of padding granted after each operand (0, or 512 for ``tail_padding_512``).

    Raises:
        ValueError: status, kind and reason contradict each other.
    """

    check: str
    version: int
    status: CheckStatus
    seed: int
    kind: FailureKind | None = None
    reason: UnprovenReason | None = None
    detail: str = ""
    launches: int = 0
    worst_error: float | None = None
    requires: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    placements: tuple[str, ...] = ()
    slack: int = 0

    def __post_init__(self) -> None:
        if (self.status is CheckStatus.FAILED) != (self.kind is not None):
            raise ValueError(f"check {self.check}: {self.status.value} contradicts kind {self.kind}")
        if (self.status is CheckStatus.UNPROVEN) != (self.reason is not None):
            raise ValueError(f"check {self.check}: {self.status.value} contradicts reason {self.reason}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        data = asdict(self)
        for key in ("status", "kind", "reason"):
            data[key] = data[key].value if data[key] is not None else None
        for key in ("requires", "limits", "placements"):
            data[key] = list(data[key])
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CheckResult:
        """Inverse of :meth:`to_dict`."""
        return cls(
            **{
                **data,
                "status": CheckStatus(data["status"]),
                "kind": FailureKind(data["kind"]) if data["kind"] else None,
                "reason": UnprovenReason(data["reason"]) if data["reason"] else None,
                "requires": tuple(data["requires"]),
                "limits": tuple(data["limits"]),
                "placements": tuple(data["placements"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the stored rows prove about one route in one column."""

    status: Status
    kind: FailureKind | None = None
    reason: str = ""
    check: str = ""
    requires: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    launches: int = 0
    checks: int = 0
    worst_error: float | None = None

    def __post_init__(self) -> None:
        if (self.status is Status.UNSAFE) != (self.kind is not None):
            raise ValueError(f"verdict {self.status.value} contradicts kind {self.kind}")


def conclude(results: Sequence[CheckResult], expected: Iterable[str]) -> Verdict:
    """The one rule from proof rows to a verdict.

    Any failed check makes the route unsafe, whatever else is missing: a fault seen once is a fault.
    Otherwise every expected check must have passed or be inapplicable; one in which the route refused the
    call by its contract makes it refused, a missing or unproven one leaves it unproven. A route whose every
    check is inapplicable has proven nothing.

    Args:
        results: the rows of one route and column, at most one per check.
        expected: names of the checks that this version of the package runs on this device.

    Raises:
        ValueError: two rows for one check.
    """
    by_name = {result.check: result for result in results}
    if len(by_name) != len(results):
        raise ValueError("more than one row for a check")
    errors = [result.worst_error for result in results if result.worst_error is not None]
    base = Verdict(
        Status.UNPROVEN,
        requires=tuple(sorted({need for result in results for need in result.requires})),
        limits=tuple(sorted({limit for result in results for limit in result.limits})),
        launches=sum(result.launches for result in results),
        checks=sum(result.status is CheckStatus.PASSED for result in results),
        worst_error=max(errors, key=lambda error: (isnan(error), error)) if errors else None,
    )
    for result in results:
        if result.status is CheckStatus.FAILED:
            return replace(
                base, status=Status.UNSAFE, kind=result.kind, check=result.check, reason=result.detail
            )
    for name in expected:
        row = by_name.get(name)
        if row is None:
            return replace(base, reason=UnprovenReason.BUDGET.value, check=name)
        if row.status is CheckStatus.REFUSED:
            return replace(base, status=Status.REFUSED, reason=row.detail, check=name)
        if row.status is CheckStatus.UNPROVEN:
            assert row.reason is not None
            said = f"{row.reason.value} in {name}: {row.detail}" if row.detail else row.reason.value
            return replace(base, reason=said, check=name)
    if base.checks == 0:
        return replace(base, reason=UnprovenReason.INFRASTRUCTURE.value)
    return replace(base, status=Status.SAFE)
