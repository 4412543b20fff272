"""Safety proofs: one row a check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from json import loads
from typing import Any

from sqlalchemy import ColumnElement, Table, Text, and_, cast, or_, select, update

from autotune.domain.cell import Cell, Column
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.store.models import ColumnRow, ProofRow
from autotune.store.records import Fingerprint, Proof
from autotune.store.statements import WHOLE_COLUMN, Statements, on, split, table_of
from autotune.store.types import utc_now

PROOF_KEY = (
    "hardware_id",
    "software_id",
    "column_id",
    "cell_id",
    "route",
    "route_version",
    "check_name",
    "check_version",
)
_LISTS = ("requires", "limits", "placements")


class Proofs(Statements):
    """Results of checks, bound to a fingerprint."""

    def save_proof(
        self,
        fingerprint: Fingerprint,
        target: Column | Cell,
        route: str,
        route_version: int,
        result: CheckResult,
        repro: str = "",
    ) -> None:
        """Store one check's result; see :meth:`save_proofs`."""
        self.save_proofs(fingerprint, target, route, route_version, [(result, repro)])

    def save_proofs(
        self,
        fingerprint: Fingerprint,
        target: Column | Cell,
        route: str,
        route_version: int,
        results: Iterable[tuple[CheckResult, str]],
    ) -> None:
        """Store ``(result, repro)`` of several checks of one route.

        The key is fingerprint, target, route, route version, check and check version. The first result
        under a key stays, with two exceptions: one that says nothing (``unproven``) gives way to any later
        one, and a ``failed`` one replaces anything, since a fault seen once is a fault. No call can lift a
        failure.

        Args:
            target: the column, or a cell for the launch that its KV row adds.
        """
        column, cell_id = split(target)
        rows = [
            {
                "hardware_id": fingerprint.hardware_id,
                "software_id": fingerprint.software_id,
                "column_id": column.id,
                "cell_id": cell_id,
                "route": route,
                "route_version": route_version,
                "check_name": result.check,
                "check_version": result.version,
                "status": result.status.value,
                "kind": result.kind.value if result.kind else None,
                "reason": result.reason.value if result.reason else None,
                "detail": result.detail,
                "launches": result.launches,
                "worst_error": result.worst_error,
                "seed": result.seed,
                "requires": list(result.requires),
                "limits": list(result.limits),
                "placements": list(result.placements),
                "slack": result.slack,
                "repro": repro,
                "created_at": utc_now(),
            }
            for result, repro in results
        ]
        if not rows:
            return
        with self.database.write() as connection:
            self._add_column(connection, column)
            self._put(connection, ProofRow, PROOF_KEY, rows, only_if=_stricter)
        self._known_columns.add(column.id)

    def annotate(self, fingerprint: Fingerprint, proof: Proof, note: str) -> bool:
        """Append ``note`` to the detail of a failed row; nothing else of a row ever changes.

        Args:
            proof: the row as it was read.

        Returns:
            Whether the row was still as it was read.
        """
        result = proof.result
        statement = (
            update(ProofRow)
            .where(
                on(ProofRow, fingerprint),
                ProofRow.column_id == proof.column.id,
                ProofRow.cell_id == (proof.cell_id or WHOLE_COLUMN),
                ProofRow.route == proof.route,
                ProofRow.route_version == proof.route_version,
                ProofRow.check_name == result.check,
                ProofRow.check_version == result.version,
                ProofRow.status == CheckStatus.FAILED.value,
                ProofRow.detail == result.detail,
            )
            .values(detail=f"{result.detail}; {note}" if result.detail else note)
        )
        with self.database.write() as connection:
            return connection.execute(statement).rowcount > 0

    def proofs(
        self,
        fingerprint: Fingerprint,
        target: Column | Cell,
        route: str,
        route_version: int,
        versions: Mapping[str, int] | None = None,
    ) -> list[CheckResult]:
        """The stored results of one route, at most one per check, oldest first.

        Args:
            target: a column (rows about it as a whole) or a cell (rows about its own launch).
            versions: the checks' versions of this code: results of any other version or check do not count.
                None: the newest stored version of each check, for display.
        """
        column, cell_id = split(target)
        query = (
            select(ProofRow)
            .where(
                on(ProofRow, fingerprint),
                ProofRow.column_id == column.id,
                ProofRow.cell_id == cell_id,
                ProofRow.route == route,
                ProofRow.route_version == route_version,
            )
            .order_by(ProofRow.check_version, ProofRow.id)
        )
        newest: dict[str, ProofRow] = {}
        with self.database.read() as session:
            for row in session.scalars(query):
                if versions is None or versions.get(row.check_name) == row.check_version:
                    newest[row.check_name] = row
            return [
                _result(row, row.requires, row.limits, row.placements)
                for row in sorted(newest.values(), key=lambda row: row.id)
            ]

    def all_proofs(self, fingerprint: Fingerprint, status: CheckStatus | None = None) -> list[Proof]:
        """Every stored proof row of a fingerprint, every version, oldest first.

        Args:
            status: only the rows with this one; None: all.
        """
        rows = table_of(ProofRow).c
        # A study has tens of thousands of rows: columns instead of entities, and the lists as text, since
        # nearly all of them are the same few.
        texts = [cast(rows[name], Text).label(name) for name in _LISTS]
        query = (
            select(*(each for each in rows if each.name not in _LISTS), *texts)
            .where(on(ProofRow, fingerprint))
            .order_by(rows.id)
        )
        if status is not None:
            query = query.where(rows.status == status.value)
        columns: dict[str, Column] = {}
        listed: dict[str, tuple[str, ...]] = {}
        with self.database.read_connection() as connection:
            found = connection.execute(query).all()
            ids = {row.column_id for row in found}
            for id_, spec in connection.execute(select(ColumnRow.id, ColumnRow.spec)):
                if id_ in ids:
                    columns[id_] = Column.from_dict(spec)
        for text in {getattr(row, name) for row in found for name in _LISTS}:
            listed[text] = tuple(loads(text))
        return [
            Proof(
                columns[row.column_id],
                row.cell_id or None,
                row.route,
                row.route_version,
                _result(row, *(listed[getattr(row, name)] for name in _LISTS)),
                row.repro,
                row.created_at,
            )
            for row in found
        ]


def _stricter(table: Table, new: Any) -> ColumnElement[bool]:
    failed = CheckStatus.FAILED.value
    return or_(
        table.c.status == CheckStatus.UNPROVEN.value,
        and_(new.status == failed, table.c.status != failed),
    )


def _result(
    row: Any, requires: Sequence[str], limits: Sequence[str], placements: Sequence[str]
) -> CheckResult:
    return CheckResult(
        check=row.check_name,
        version=row.check_version,
        status=CheckStatus(row.status),
        seed=row.seed,
        kind=FailureKind(row.kind) if row.kind else None,
        reason=UnprovenReason(row.reason) if row.reason else None,
        detail=row.detail,
        launches=row.launches,
        worst_error=row.worst_error,
        requires=tuple(requires),
        limits=tuple(limits),
        placements=tuple(placements),
        slack=row.slack,
    )
