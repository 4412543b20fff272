"""The proofs of one fingerprint in memory: what is known, what is missing, what it amounts to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.checks import catalogue
from autotune.domain.cell import Cell
from autotune.domain.verdict import CheckResult, CheckStatus, Status, UnprovenReason, Verdict, conclude

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autotune.domain.cell import Column
    from autotune.routes.base import Route
    from autotune.store.records import Fingerprint
    from autotune.store.repository import Repository

# The check that a KV row adds at its own length, and the name under which a death while timing is stored.
ROW_CHECK = "reference"
TIMING = "timing"
TIMING_VERSION = 1

_Key = tuple[str, str, int]  # column id, route, route version


class ProofBook:
    """Every current proof row, by column and route. Rows of other versions of a check do not count."""

    def __init__(self, repository: Repository, fingerprint: Fingerprint) -> None:
        self._repository = repository
        self._fingerprint = fingerprint
        self._versions = catalogue.LISTED | {TIMING: TIMING_VERSION}
        # (cell id or "", check) -> result
        self._rows: dict[_Key, dict[tuple[str, str], CheckResult]] = {}
        self._changes: dict[str, int] = {}
        for proof in repository.all_proofs(fingerprint):
            self._note(proof.column, proof.cell_id, proof.route, proof.route_version, proof.result)

    def version(self, column: Column) -> int:
        """Rises with every row of the column that counts: what follows from equal versions is equal."""
        return self._changes.get(column.id, 0)

    def counts(self, result: CheckResult) -> bool:
        """Whether the row is of the check that this code runs, not of an older or newer one."""
        return self._versions.get(result.check) == result.version

    def _note(
        self, column: Column, cell_id: str | None, route: str, version: int, result: CheckResult
    ) -> None:
        if not self.counts(result):
            return
        self._changes[column.id] = self._changes.get(column.id, 0) + 1
        rows = self._rows.setdefault((column.id, route, version), {})
        known = rows.get((cell_id or "", result.check))
        # as in the store: a row that says nothing gives way, and nothing lifts a failure
        if known is None or known.status is CheckStatus.UNPROVEN or result.status is CheckStatus.FAILED:
            rows[cell_id or "", result.check] = result

    def save(self, target: Column | Cell, route: Route, result: CheckResult, repro: str) -> None:
        """Commit a row, then count it."""
        self._repository.save_proof(self._fingerprint, target, route.name, route.version, result, repro=repro)
        column, cell_id = (target.column, target.id) if isinstance(target, Cell) else (target, None)
        self._note(column, cell_id, route.name, route.version, result)

    def renew(self) -> None:
        """Take up faults that other processes have found meanwhile: on PostgreSQL another study of this
        fingerprint may be running, and an export may read while a run goes on."""
        for proof in self._repository.all_proofs(self._fingerprint, CheckStatus.FAILED):
            key = (proof.column.id, proof.route, proof.route_version)
            known = self._rows.get(key, {}).get((proof.cell_id or "", proof.result.check))
            if known is None or known.status is not CheckStatus.FAILED:
                self._note(proof.column, proof.cell_id, proof.route, proof.route_version, proof.result)

    def knows(self, route: Route, column: Column) -> bool:
        """Whether anything is stored about the route in the column."""
        return (column.id, route.name, route.version) in self._rows

    def trouble(self, routes: Iterable[Route], cell: Cell) -> str:
        """Why timing the cell last ended before its time, through nobody's fault; or an empty string."""
        for route in routes:
            row = self._rows.get((cell.column.id, route.name, route.version), {}).get((cell.id, TIMING))
            if row is not None and row.status is CheckStatus.UNPROVEN:
                return row.detail
        return ""

    def missing(self, route: Route, column: Column, device: str) -> list[str]:
        """Checks of the column that have no row, or one that says nothing, in running order."""
        rows = self._rows.get((column.id, route.name, route.version), {})
        return [name for name in catalogue.runs(column, device) if _open(rows.get(("", name)))]

    def lacks_row(self, route: Route, cell: Cell) -> bool:
        """Whether the cell's own launch is still to be made."""
        row = self._rows.get((cell.column.id, route.name, route.version), {}).get((cell.id, ROW_CHECK))
        return _open(row)

    def owed(self, route: Route, column: Column, cells: Iterable[Cell], device: str) -> float:
        """Checks of the route that are still to be run in the column and these cells of it, as a share of all
        checks of a column; 0.0 once it is known to be unsafe."""
        if self.verdict(route, column, device).status is Status.UNSAFE:
            return 0.0
        missing = len(self.missing(route, column, device)) + sum(self.lacks_row(route, c) for c in cells)
        return missing / len(catalogue.runs(column, device))

    def verdict(self, route: Route, column: Column, device: str, cell: Cell | None = None) -> Verdict:
        """What the rows prove of ``route`` in ``column``, and in ``cell`` if one is given.

        A fault in any cell of a column, while proving or timing, makes the route unsafe in the whole
        column: lengths vary from step to step.
        """
        expected: Iterable[str] = catalogue.expected(column, device)
        rows: list[CheckResult] = []
        for (cell_id, check), result in self._rows.get((column.id, route.name, route.version), {}).items():
            if not cell_id:
                rows.append(result)
            elif cell is not None and cell_id == cell.id and check == ROW_CHECK:
                rows.append(replace(result, check=f"{check}@{cell.kv_high}"))
            elif result.status is CheckStatus.FAILED:
                rows.append(replace(result, check=f"{check} in cell {cell_id}"))
        if cell is not None:
            expected = (*expected, f"{ROW_CHECK}@{cell.kv_high}")
        verdict = conclude(rows, expected)
        tried = {row.check for row in rows if row.status is not CheckStatus.UNPROVEN}
        untried = catalogue.STATES_LIMITS - tried
        if verdict.status is not Status.SAFE or not untried:
            return verdict
        said = {f"{name} was not run" for name in untried}
        return replace(verdict, limits=tuple(sorted({*verdict.limits, *said})))


def _open(row: CheckResult | None) -> bool:
    """Whether a check is still to be run: it says nothing yet, and trying again may help."""
    return row is None or (row.status is CheckStatus.UNPROVEN and row.reason is not UnprovenReason.UNCLEAR)
