"""Does every check on this device see the fault that it is there for?

Each check first runs on a clean planted kernel, then on each kernel that is wrong in the way it must
notice. A fault that goes unseen, or a clean kernel that is accused, means that no verdict from this
machine is worth anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.arena.factory import default_kind
from autotune.checks.catalogue import STATES_LIMITS
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, Status
from autotune.hardware.collect import collect
from autotune.worker.jobs import ProveJob, run_check

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from autotune.checks.controls import Control
    from autotune.domain.fingerprint import Facts
    from autotune.worker.worker import Worker

SKIPPED = "skipped"
# A planted hang stays in one launch for 30 s; the clean kernels' launches take milliseconds. On CUDA a new
# child imports Triton and makes its context inside the step that opens the session.
HANG_TIMEOUT_S = {"cpu": 2.0, "cuda": 8.0}


@dataclass(frozen=True, slots=True)
class ControlResult:
    """One control shown to its check.

    Attributes:
        expected: a failure kind, a requirement that a pass must carry, or ``safe`` for the clean kernel.
        got: the failure kind seen, the requirements of a pass, ``safe``, ``skipped``, or why nothing is
            known.
        detected: a planted fault was seen as what it is; False for a clean kernel that passed.
        detail: the check's own words.
    """

    control: str
    check: str
    expected: str
    got: str
    detected: bool
    detail: str = ""

    @property
    def ok(self) -> bool:
        """As it must be."""
        return self.got == self.expected

    def to_dict(self) -> dict[str, Any]:
        """As ``autotune selftest --json`` prints it."""
        return {
            "control": self.control,
            "check": self.check,
            "expected": self.expected,
            "got": self.got,
            "detected": self.detected,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True)
class SelfTest:
    """All results, in the order in which they were had."""

    results: tuple[ControlResult, ...]

    @property
    def ok(self) -> bool:
        """Every planted fault was detected as its kind, no clean kernel was accused, and both were tried."""
        planted = [result for result in self.results if result.expected != Status.SAFE.value]
        return bool(planted) and all(result.ok for result in self.results)

    @property
    def failures(self) -> tuple[ControlResult, ...]:
        """What stops a run."""
        return tuple(result for result in self.results if not result.ok)


def chosen(device: str, only: str | None = None, skip: Set[str] = frozenset()) -> tuple[Control, ...]:
    """The controls that :func:`run_selftest` gives a result for; a skipped check has no clean ones.

    Raises:
        UnknownCheckError: ``only`` or ``skip`` names no check; the message lists them.
        ValueError: there are no planted kernels for this device.
    """
    from autotune.checks import registry
    from autotune.checks.controls import controls

    for name in sorted(skip):
        registry.get(name)
    found = controls(only, device.partition(":")[0])
    return tuple(control for control in found if control.check not in skip or control.expected is not None)


def run_selftest(
    worker: Worker,
    device: str,
    *,
    only: str | None = None,
    skip: Set[str] = frozenset(),
    on_result: Callable[[ControlResult], None] | None = None,
    facts: Facts | None = None,
) -> SelfTest:
    """Show each check its clean kernel and its planted faults.

    Args:
        device: torch device string, the worker's.
        only: run this check's controls alone.
        skip: checks that are not run: their controls stay undetected.
        on_result: called with each result as it comes.
        facts: this machine; collected if None.

    Raises:
        UnknownCheckError: ``only`` or ``skip`` names no check; the message lists them.
        ValueError: there are no planted kernels for this device.
        WorkerError: no child can be had.
    """
    facts = collect(device, threads=1) if facts is None else facts
    results: list[ControlResult] = []
    for control in chosen(device, only, skip):
        if control.needs is not None and not facts.software.get(control.needs):
            continue
        if control.check in skip:
            assert control.expected is not None
            result = ControlResult(control.name, control.check, control.expected.value, SKIPPED, False)
        else:
            result = _show(worker, device, facts, control)
        results.append(result)
        if on_result is not None:
            on_result(result)
    return SelfTest(tuple(results))


def _show(worker: Worker, device: str, facts: Facts, control: Control) -> ControlResult:
    """Run one control, without a second run that allows padding: a small overrun would pass it."""
    from autotune.checks.controls import SEED

    job = ProveJob(
        route=control.route.name,
        check=control.check,
        column=control.column.to_dict(),
        facts=facts.to_dict(),
        kv_lens=control.kv_lens,
        seed=SEED,
        device=device,
        arena_kind=default_kind(device),
    )
    hang = control.expected is FailureKind.HANG
    row = run_check(worker, job, step_timeout_s=HANG_TIMEOUT_S[device.partition(":")[0]] if hang else None)
    if control.expected is None:
        # a clean kernel that is accused has been "detected" as something it is not
        accused = row.status is CheckStatus.FAILED or bool(row.requires) or _limited(row)
        return ControlResult(control.name, control.check, Status.SAFE.value, _seen(row), accused, row.detail)
    seen = _seen(row)
    return ControlResult(
        control.name, control.check, control.expected.value, seen, seen == control.expected.value, row.detail
    )


def _limited(row: CheckResult) -> bool:
    """Whether a check that is there to find limits found one."""
    return row.check in STATES_LIMITS and bool(row.limits)


def _seen(row: CheckResult) -> str:
    if row.status is CheckStatus.PASSED:
        return ", ".join(row.requires) or ("limit" if _limited(row) else Status.SAFE.value)
    if row.kind is not None:
        return row.kind.value
    return row.reason.value if row.reason is not None else row.status.value
