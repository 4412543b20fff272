"""Self-tests, quarantines, exports and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from autotune.domain.cell import Cell, Column
from autotune.domain.verdict import CheckStatus
from autotune.store.models import (
    CellRow,
    ColumnRow,
    DecisionRow,
    ExportRow,
    ProofRow,
    QuarantineRow,
    SelftestRow,
    TrialRow,
)
from autotune.store.records import Export, Fingerprint, Quarantine, Selftest, Study, Summary
from autotune.store.statements import Statements, on, split, table_of
from autotune.store.types import utc_now

QUARANTINE_KEY = ("hardware_id", "software_id", "column_id", "cell_id", "route")


class Upkeep(Statements):
    """What is kept beside the measurements."""

    def save_selftest(
        self,
        fingerprint: Fingerprint,
        code_version: str,
        *,
        passed: bool,
        results: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store the outcome of the controls, in place of an earlier one of the same code."""
        row = {
            "hardware_id": fingerprint.hardware_id,
            "software_id": fingerprint.software_id,
            "code_version": code_version,
            "passed": passed,
            "results": [dict(each) for each in results],
            "created_at": utc_now(),
        }
        with self.database.write() as connection:
            self._put(connection, SelftestRow, ("hardware_id", "software_id", "code_version"), [row])

    def selftest(self, fingerprint: Fingerprint, code_version: str) -> Selftest | None:
        """The stored outcome of exactly this code on exactly this fingerprint, or None."""
        with self.database.read() as session:
            row = session.get(SelftestRow, (fingerprint.hardware_id, fingerprint.software_id, code_version))
            return None if row is None else Selftest(row.passed, row.results, row.created_at)

    def add_quarantine(
        self, fingerprint: Fingerprint, target: Column | Cell, route: str, reason: str
    ) -> None:
        """Set a route aside in a column or a cell; repeated, the newer reason stays."""
        column, cell_id = split(target)
        row = {
            "hardware_id": fingerprint.hardware_id,
            "software_id": fingerprint.software_id,
            "column_id": column.id,
            "cell_id": cell_id,
            "route": route,
            "reason": reason,
            "created_at": utc_now(),
        }
        with self.database.write() as connection:
            self._add_column(connection, column)
            self._put(connection, QuarantineRow, QUARANTINE_KEY, [row])
        self._known_columns.add(column.id)

    def lift_quarantine(self, fingerprint: Fingerprint, target: Column | Cell, route: str) -> bool:
        """Take it back; False if there was none."""
        column, cell_id = split(target)
        statement = delete(QuarantineRow).where(
            on(QuarantineRow, fingerprint),
            QuarantineRow.column_id == column.id,
            QuarantineRow.cell_id == cell_id,
            QuarantineRow.route == route,
        )
        with self.database.write() as connection:
            return connection.execute(statement).rowcount > 0

    def quarantined(self, fingerprint: Fingerprint) -> list[Quarantine]:
        """Everything set aside on a fingerprint, oldest first."""
        query = (
            select(QuarantineRow, ColumnRow)
            .join(ColumnRow, ColumnRow.id == QuarantineRow.column_id)
            .where(on(QuarantineRow, fingerprint))
            .order_by(QuarantineRow.id)
        )
        with self.database.read() as session:
            return [
                Quarantine(
                    Column.from_dict(column.spec), row.cell_id or None, row.route, row.reason, row.created_at
                )
                for row, column in session.execute(query)
            ]

    def record_export(self, study: Study, kind: str, path: str, digest: str) -> None:
        """Note that a file was written from the study."""
        with self.database.write() as connection:
            connection.execute(
                table_of(ExportRow).insert(),
                {"study_id": study.id, "kind": kind, "path": path, "digest": digest},
            )

    def exports(self, study: Study) -> list[Export]:
        """Files written from the study, oldest first."""
        query = select(ExportRow).where(ExportRow.study_id == study.id).order_by(ExportRow.id)
        with self.database.read() as session:
            return [Export(row.kind, row.path, row.digest, row.created_at) for row in session.scalars(query)]

    def summary(self, study: Study) -> Summary:
        """Counts of a study, all from one snapshot."""
        mine = DecisionRow.study_id == study.id
        columns = select(CellRow.column_id).where(CellRow.study_id == study.id)
        proofs = and_(on(ProofRow, study.fingerprint), ProofRow.column_id.in_(columns))
        unsafe = (
            select(ProofRow.column_id, ProofRow.route)
            .where(proofs, ProofRow.status == CheckStatus.FAILED.value)
            .distinct()
            .subquery()
        )
        with self.database.read() as session:
            reasons = _counts(session, DecisionRow.reason, mine)
            kills, retries = session.execute(
                select(
                    func.coalesce(func.sum(TrialRow.kills), 0), func.coalesce(func.sum(TrialRow.retries), 0)
                ).where(TrialRow.study_id == study.id)
            ).one()
            return Summary(
                cells=session.scalar(select(func.count()).where(CellRow.study_id == study.id)) or 0,
                decided=sum(reasons.values()),
                reasons=reasons,
                routes=_counts(session, DecisionRow.route, and_(mine, DecisionRow.route.is_not(None))),
                checks=_counts(session, ProofRow.status, proofs),
                unsafe=session.scalar(select(func.count()).select_from(unsafe)) or 0,
                kills=kills,
                retries=retries,
            )


def _counts(
    session: Session, name: InstrumentedAttribute[Any], condition: ColumnElement[bool]
) -> dict[str, int]:
    """Rows by the value of ``name``."""
    query = select(name, func.count()).where(condition).group_by(name).order_by(name)
    return {str(key): int(count) for key, count in session.execute(query)}
