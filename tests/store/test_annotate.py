"""A note behind the detail of a failed row, on each backend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.domain.cell import Cell
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.store.records import Fingerprint, Proof
from autotune.store.repository import Repository

FAILED = CheckResult("reference", 1, CheckStatus.FAILED, 2, kind=FailureKind.ILLEGAL_ACCESS, detail="row 3")


def stored(repository: Repository, fingerprint: Fingerprint) -> dict[tuple[str, str], Proof]:
    """By route and cell id."""
    return {(p.route, p.cell_id or ""): p for p in repository.all_proofs(fingerprint)}


@pytest.mark.parametrize("detail", ["row 3", "nul \x00 and \ud800", "100 % _ ' \" ü"])
def test_a_note_is_appended_once_to_its_row(
    repository: Repository, fingerprint: Fingerprint, cell: Cell, detail: str
) -> None:
    result = replace(FAILED, detail=detail)
    for target in (cell, cell.column):
        for route in ("xqa", "fa2"):
            repository.save_proof(fingerprint, target, route, 1, result, repro="autotune prove")
    before = stored(repository, fingerprint)
    row = before["xqa", cell.id]
    assert repository.annotate(fingerprint, row, "sanitizer: found")
    assert not repository.annotate(fingerprint, row, "sanitizer: found")  # it is not as it was read any more
    after = stored(repository, fingerprint)
    noted = after.pop(("xqa", cell.id))
    del before["xqa", cell.id]
    assert after == before
    assert noted.result.detail == f"{row.result.detail}; sanitizer: found"
    assert replace(noted, result=row.result) == row
    # no later result lifts the failure or its note
    repository.save_proof(fingerprint, cell, "xqa", 1, result)
    assert stored(repository, fingerprint)["xqa", cell.id] == noted


def test_a_row_without_a_detail(repository: Repository, fingerprint: Fingerprint, cell: Cell) -> None:
    repository.save_proof(fingerprint, cell.column, "xqa", 1, replace(FAILED, detail=""))
    assert repository.annotate(fingerprint, stored(repository, fingerprint)["xqa", ""], "sanitizer: found")
    assert stored(repository, fingerprint)["xqa", ""].result.detail == "sanitizer: found"


@pytest.mark.parametrize(
    "result",
    [
        CheckResult("reference", 1, CheckStatus.PASSED, 2, detail="row 3"),
        CheckResult("reference", 1, CheckStatus.UNPROVEN, 2, reason=UnprovenReason.BUDGET, detail="row 3"),
    ],
    ids=lambda result: result.status.value,
)
def test_only_a_failed_row(
    repository: Repository, fingerprint: Fingerprint, cell: Cell, result: CheckResult
) -> None:
    repository.save_proof(fingerprint, cell.column, "xqa", 1, result)
    row = stored(repository, fingerprint)["xqa", ""]
    assert not repository.annotate(fingerprint, row, "sanitizer: found")
    assert stored(repository, fingerprint)["xqa", ""] == row
