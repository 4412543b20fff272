"""A fault that padding does not explain is not excused because it did not come again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind
from autotune.worker.base import Completed, Failed, Outcome
from autotune.worker.failure import FaultSite
from autotune.worker.jobs import TAIL_PADDING, prove
from autotune.worker.worker import Worker
from tests.worker.test_jobs import JOB

PASSED = Completed(CheckResult("reference", 1, CheckStatus.PASSED, JOB.seed, launches=2).to_dict())
ON_CUDA = Failed(FailureKind.ILLEGAL_ACCESS, "an illegal memory access was encountered", "launch", steps=1)
CUDA_JOB = replace(JOB, device="cuda", arena_kind="cuda_vmm")


def at(offset: int | None) -> Failed:
    site = FaultSite("SIGSEGV", 4096, inside_hole=True, operand="q", offset=offset)
    return Failed(FailureKind.ILLEGAL_ACCESS, "SIGSEGV", "launch", site, steps=1)


class Scripted:
    """Answers in turn; notes the padding of each run."""

    def __init__(self, *answers: Outcome) -> None:
        self.left = list(answers)
        self.slacks: list[int] = []

    def run(self, job: Any, **limits: Any) -> Outcome:
        self.slacks.append(job.slack)
        return self.left.pop(0)


def proven(script: Scripted, job: Any) -> CheckResult:
    return prove(cast(Worker, script), job)


@pytest.mark.parametrize("offset", [None, -1, -(1 << 20), TAIL_PADDING, 1 << 20])
def test_a_fault_elsewhere_gets_no_second_run(offset: int | None) -> None:
    script = Scripted(at(offset), PASSED)
    row = proven(script, JOB)
    assert (row.kind, row.requires, row.launches) == (FailureKind.ILLEGAL_ACCESS, (), 1)
    assert script.slacks == [0]


@pytest.mark.parametrize("offset", [0, TAIL_PADDING - 1])
def test_a_fault_within_the_padding_does(offset: int) -> None:
    script = Scripted(at(offset), PASSED)
    row = proven(script, JOB)
    assert (row.status, row.requires, row.launches) == (CheckStatus.PASSED, ("tail_padding_512",), 3)
    assert script.slacks == [0, TAIL_PADDING]


def test_without_a_site_the_fault_must_come_again_without_padding() -> None:
    script = Scripted(ON_CUDA, PASSED, ON_CUDA)
    row = proven(script, CUDA_JOB)
    assert (row.status, row.requires, row.launches) == (CheckStatus.PASSED, ("tail_padding_512",), 4)
    assert script.slacks == [0, TAIL_PADDING, 0]


@pytest.mark.parametrize(
    ("third", "word"),
    [(PASSED, "passed"), (Failed(FailureKind.HANG, "no progress", "launch", steps=1), "hang")],
)
def test_without_a_site_a_rare_access_stays_a_fault(third: Outcome, word: str) -> None:
    script = Scripted(ON_CUDA, PASSED, third)
    row = proven(script, CUDA_JOB)
    assert (row.status, row.kind, row.requires) == (CheckStatus.FAILED, FailureKind.ILLEGAL_ACCESS, ())
    assert f"ended otherwise ({word})" in row.detail
    assert row.slack == 0


def test_without_a_site_padding_that_does_not_help_ends_it() -> None:
    script = Scripted(ON_CUDA, ON_CUDA)
    row = proven(script, CUDA_JOB)
    assert row.kind is FailureKind.ILLEGAL_ACCESS
    assert script.slacks == [0, TAIL_PADDING]
