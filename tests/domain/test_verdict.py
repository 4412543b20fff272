from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.domain.decision import Decision, Reason
from autotune.domain.verdict import (
    CheckResult,
    CheckStatus,
    FailureKind,
    Status,
    UnprovenReason,
    Verdict,
    conclude,
)

NAMES = ["a", "b", "c", "d"]


def result(name: str, status: CheckStatus = CheckStatus.PASSED, **extra: object) -> CheckResult:
    if status is CheckStatus.FAILED:
        extra.setdefault("kind", FailureKind.WRONG_OUTPUT)
    if status is CheckStatus.UNPROVEN:
        extra.setdefault("reason", UnprovenReason.OUT_OF_MEMORY)
    return CheckResult(name, 1, status, seed=1, **extra)  # type: ignore[arg-type]


ROWS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(list(CheckStatus))), unique_by=lambda row: row[0]
).map(lambda rows: [result(name, status) for name, status in rows])


@given(ROWS, st.lists(st.sampled_from(NAMES), unique=True))
def test_safe_means_every_expected_check_passed_or_says_nothing(
    rows: list[CheckResult], expected: list[str]
) -> None:
    verdict = conclude(rows, expected)
    statuses = {row.check: row.status for row in rows}
    if verdict.status is Status.SAFE:
        assert all(
            statuses.get(name) in (CheckStatus.PASSED, CheckStatus.NOT_APPLICABLE) for name in expected
        )
        assert CheckStatus.FAILED not in statuses.values()
        assert CheckStatus.PASSED in statuses.values()
    assert (verdict.status is Status.UNSAFE) == (CheckStatus.FAILED in statuses.values())


def test_a_fault_counts_even_where_other_rows_are_missing() -> None:
    failed = result("b", CheckStatus.FAILED, kind=FailureKind.ILLEGAL_ACCESS, detail="page_table +4")
    verdict = conclude([failed], NAMES)
    assert (verdict.status, verdict.kind, verdict.check) == (Status.UNSAFE, FailureKind.ILLEGAL_ACCESS, "b")


def test_a_missing_row_and_one_out_of_memory_leave_it_unproven() -> None:
    assert conclude([result("a")], ["a", "b"]).reason == "budget"
    verdict = conclude([result("a"), result("b", CheckStatus.UNPROVEN)], ["a", "b"])
    assert (verdict.status, verdict.reason, verdict.check) == (Status.UNPROVEN, "out_of_memory", "b")


def test_nothing_applicable_proves_nothing() -> None:
    assert conclude([result("a", CheckStatus.NOT_APPLICABLE)], ["a"]).status is Status.UNPROVEN
    assert conclude([], []).status is Status.UNPROVEN


def test_two_rows_for_one_check_are_refused() -> None:
    with pytest.raises(ValueError, match="more than one"):
        conclude([result("a"), result("a")], ["a"])


def test_the_verdict_adds_up_its_rows() -> None:
    rows = [
        result("a", launches=3, worst_error=0.25, requires=("finite_pool",)),
        result("b", launches=4, worst_error=0.5, limits=("logits > -5e4",)),
    ]
    verdict = conclude(rows, ["a", "b"])
    assert verdict == Verdict(
        Status.SAFE,
        requires=("finite_pool",),
        limits=("logits > -5e4",),
        launches=7,
        checks=2,
        worst_error=0.5,
    )


@pytest.mark.parametrize("order", [(0.1, float("nan")), (float("nan"), 0.1)])
def test_an_error_that_is_no_number_is_the_worst_in_any_order(order: tuple[float, float]) -> None:
    rows = [result(name, worst_error=error) for name, error in zip("ab", order, strict=True)]
    worst = conclude(rows, ["a", "b"]).worst_error
    assert worst is not None and math.isnan(worst)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="contradicts"):
        CheckResult("a", 1, CheckStatus.PASSED, seed=1, kind=FailureKind.HANG)
    with pytest.raises(ValueError, match="contradicts"):
        CheckResult("a", 1, CheckStatus.UNPROVEN, seed=1)
    with pytest.raises(ValueError, match="contradicts"):
        Verdict(Status.SAFE, kind=FailureKind.HANG)
    with pytest.raises(ValueError, match="contradicts"):
        Decision("xqa-decode", Reason.UNDECIDED)
    with pytest.raises(ValueError, match="contradicts"):
        Decision(None, Reason.PROVEN_FASTER)


@given(st.sampled_from(list(CheckStatus)))
def test_a_row_survives_its_dict(status: CheckStatus) -> None:
    row = result("a", status, placements=("tail",), limits=("x",))
    assert CheckResult.from_dict(row.to_dict()) == row
