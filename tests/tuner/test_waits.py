from __future__ import annotations

import pytest

from autotune.domain.verdict import FailureKind, Status, Verdict
from autotune.tuner.standing import Evidence
from autotune.tuner.tuner import _waits

SAFE = Verdict(Status.SAFE)


@pytest.mark.parametrize(
    ("verdict", "too_large", "waits"),
    [
        (Verdict(Status.UNPROVEN, reason="out_of_memory"), "", True),
        (Verdict(Status.UNPROVEN, reason="budget"), "does not fit", False),
        (SAFE, "", False),
        (Verdict(Status.UNSAFE, FailureKind.HANG), "", False),
    ],
)
def test_no_round_is_run_before_the_fallback_is_proven(verdict: Verdict, too_large: str, waits: bool) -> None:
    assert _waits(Evidence("fa2", verdict, (), too_large=too_large)) is waits
