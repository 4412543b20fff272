"""Every question and answer between the program and its database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from autotune.domain.cell import Cell, Column
from autotune.domain.decision import Decision, Reason
from autotune.domain.fingerprint import Facts
from autotune.domain.identity import stable_id
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.store.database import Database
from autotune.store.errors import RoundsConflictError, StudyMismatchError, UnknownStudyError
from autotune.store.models import (
    Base,
    CellRow,
    ColumnRow,
    DecisionRow,
    ExportRow,
    HardwareRow,
    ProofRow,
    QuarantineRow,
    RoundChunkRow,
    SelftestRow,
    SoftwareRow,
    StudyRow,
    TimingRow,
    TrialRow,
)
from autotune.store.records import (
    Export,
    Fingerprint,
    Proof,
    Quarantine,
    Selftest,
    Study,
    StudyCell,
    Summary,
    Timing,
    TrialRecord,
    TrialState,
)
from autotune.store.types import dumps, utc_now

# ``proof.cell_id`` of a row about the column as a whole: part of a unique key, so it cannot be NULL.
WHOLE_COLUMN = ""


class Repository:
    """Typed access to one database. Each call is one transaction, committed before it returns.

    Every method raises ``StoreError`` (one line) when the database fails; what the failing call was to store
    is then not stored, and everything before it is.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert
        self._known_columns: set[str] = set()

    # -- fingerprints and studies

    def register_fingerprint(self, facts: Facts) -> Fingerprint:
        """Store the facts once; equal facts give an equal fingerprint."""
        fingerprint = Fingerprint.of(facts)
        with self.database.write() as connection:
            self._add(
                connection,
                HardwareRow,
                id=fingerprint.hardware_id,
                device=facts.device,
                name=str(facts.hardware.get("name", "")),
                facts=dict(facts.hardware),
            )
            self._add(
                connection,
                SoftwareRow,
                id=fingerprint.software_id,
                device=facts.device,
                facts=dict(facts.software),
            )
        return fingerprint

    def find_study(
        self, fingerprint: Fingerprint, space_name: str, space_digest: str, engine: str
    ) -> Study | None:
        """The study that ``open_study`` with these four would resume, or None."""
        with self.database.read() as session:
            row = session.get(StudyRow, _study_id(fingerprint, space_name, space_digest, engine))
            return None if row is None else _study(session, row)

    def open_study(
        self,
        fingerprint: Fingerprint,
        *,
        space_name: str,
        space_digest: str,
        engine: str,
        objectives: Sequence[str],
        margin: float,
        multiplicity: int,
        unit: str,
        seed: int,
        code_version: str,
    ) -> Study:
        """Create the study of this fingerprint, space and engine, or resume it.

        Margin, multiplicity, unit and objectives are fixed when it is created. So are seed and code version,
        but another value of these is no contradiction: the stored one is returned.

        Args:
            fingerprint: from ``register_fingerprint``.

        Raises:
            StudyMismatchError: it exists with another margin, multiplicity, unit or objectives.
        """
        study_id = _study_id(fingerprint, space_name, space_digest, engine)
        with self.database.write() as connection:
            created = self._add(
                connection,
                StudyRow,
                id=study_id,
                hardware_id=fingerprint.hardware_id,
                software_id=fingerprint.software_id,
                informative=dict(fingerprint.facts.informative),
                space_name=space_name,
                space_digest=space_digest,
                engine=engine,
                objectives=list(objectives),
                margin=margin,
                multiplicity=multiplicity,
                unit=unit,
                seed=seed,
                code_version=code_version,
            )
        study = self.study(study_id)
        for name, asked in (
            ("objectives", tuple(objectives)),
            ("margin", margin),
            ("multiplicity", multiplicity),
            ("unit", unit),
        ):
            stored = getattr(study, name)
            if stored != asked:
                raise StudyMismatchError(
                    f"{self.database.where}: study {study_id} was created with {name} {_shown(stored)}, not "
                    f"{_shown(asked)}; its error rate holds only unchanged, so name another database"
                )
        return replace(study, resumed=not created)

    def study(self, study_id: str) -> Study:
        """A study by its id. Raises ``UnknownStudyError``."""
        with self.database.read() as session:
            row = session.get(StudyRow, study_id)
            if row is None:
                raise UnknownStudyError(f"{self.database.where}: has no study {study_id!r}")
            return _study(session, row)

    def studies(self) -> list[Study]:
        """Every study, oldest first."""
        with self.database.read() as session:
            rows = session.scalars(select(StudyRow).order_by(StudyRow.created_at, StudyRow.id))
            return [_study(session, row) for row in rows]

    # -- cells

    def add_cells(self, study: Study, cells: Iterable[tuple[Cell, Sequence[str], int]]) -> int:
        """Add ``(cell, models, position)`` to the study's queue; cells it has are left as they are.

        Returns:
            How many were new.
        """
        entries = list(cells)
        with self.database.write() as connection:
            query = select(CellRow.cell_id, CellRow.number).where(CellRow.study_id == study.id)
            known = {row.cell_id: row.number for row in connection.execute(query)}
            new: dict[str, dict[str, Any]] = {}
            number = max(known.values(), default=-1) + 1
            for cell, models, position in entries:
                if cell.id in known or cell.id in new:
                    continue
                new[cell.id] = {
                    "study_id": study.id,
                    "cell_id": cell.id,
                    "number": number + len(new),
                    "position": position,
                    "column_id": cell.column.id,
                    "kv_low": cell.kv_low,
                    "kv_high": cell.kv_high,
                    "models": list(models),
                }
            columns = {cell.column.id: cell.column for cell, _, _ in entries if cell.id in new}
            for column in columns.values():
                self._add_column(connection, column)
            if new:
                connection.execute(self._insert(_table(CellRow)), list(new.values()))
        self._known_columns |= set(columns)
        return len(new)

    def cells(self, study: Study) -> list[StudyCell]:
        """Every cell, in queue order."""
        return self._cells(study, None)

    def pending(self, study: Study) -> list[StudyCell]:
        """Cells without a decision, in queue order."""
        return self._cells(study, DecisionRow.cell_id.is_(None))

    def _cells(self, study: Study, condition: ColumnElement[bool] | None) -> list[StudyCell]:
        query = (
            select(CellRow, ColumnRow)
            .join(ColumnRow, ColumnRow.id == CellRow.column_id)
            .outerjoin(DecisionRow, _same_cell(DecisionRow))
            .where(CellRow.study_id == study.id)
            .order_by(CellRow.position, CellRow.number)
        )
        if condition is not None:
            query = query.where(condition)
        columns: dict[str, Column] = {}
        with self.database.read() as session:
            found = []
            for cell, column in session.execute(query):
                if column.id not in columns:
                    columns[column.id] = Column.from_dict(column.spec)
                found.append(
                    StudyCell(
                        Cell(columns[column.id], cell.kv_low, cell.kv_high),
                        cell.number,
                        cell.position,
                        tuple(cell.models),
                    )
                )
            return found

    # -- proofs

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
        column, cell_id = _split(target)
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
        table = _table(ProofRow)
        statement = self._insert(table)
        key = _PROOF_KEY
        new = statement.excluded
        statement = statement.on_conflict_do_update(
            index_elements=key,
            set_={name: new[name] for name in rows[0] if name not in key},
            where=or_(
                table.c.status == CheckStatus.UNPROVEN.value,
                and_(
                    new.status == CheckStatus.FAILED.value,
                    table.c.status != CheckStatus.FAILED.value,
                ),
            ),
        )
        with self.database.write() as connection:
            self._add_column(connection, column)
            connection.execute(statement, rows)
        self._known_columns.add(column.id)

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
        column, cell_id = _split(target)
        query = (
            select(ProofRow)
            .where(
                _on(ProofRow, fingerprint),
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
            return [_result(row) for row in sorted(newest.values(), key=lambda row: row.id)]

    def all_proofs(self, fingerprint: Fingerprint) -> list[Proof]:
        """Every stored proof row of a fingerprint, every version, oldest first."""
        query = (
            select(ProofRow, ColumnRow)
            .join(ColumnRow, ColumnRow.id == ProofRow.column_id)
            .where(_on(ProofRow, fingerprint))
            .order_by(ProofRow.id)
        )
        columns: dict[str, Column] = {}
        with self.database.read() as session:
            found = []
            for row, column in session.execute(query):
                if column.id not in columns:
                    columns[column.id] = Column.from_dict(column.spec)
                found.append(
                    Proof(
                        columns[column.id],
                        row.cell_id or None,
                        row.route,
                        row.route_version,
                        _result(row),
                        row.repro,
                        row.created_at,
                    )
                )
            return found

    # -- rounds, timings, decisions

    def append_rounds(self, study: Study, cell: Cell, first: int, rounds: Sequence[Mapping[str, Any]]) -> int:
        """Commit raw rounds, before anything is concluded from them. The cost is that of the new ones.

        Args:
            first: index of the first of them; the number stored so far.
            rounds: JSON-ready, one mapping per round; finite numbers only.

        Returns:
            Rounds stored for the cell. A chunk that is stored already, equal in every value, changes nothing.

        Raises:
            RoundsConflictError: they leave a gap, or overlap stored rounds with other values.
            ValueError: a value is not JSON (NaN and infinity are not).
        """
        chunk = [dict(each) for each in rounds]
        text = dumps(chunk)
        table = _table(RoundChunkRow)
        mine = and_(table.c.study_id == study.id, table.c.cell_id == cell.id)
        with self.database.write() as connection:
            last = connection.execute(
                select(table.c.first_round, table.c.size)
                .where(mine)
                .order_by(table.c.first_round.desc())
                .limit(1)
            ).first()
            stored = last[0] + last[1] if last else 0
            if not chunk:
                return stored
            if first != stored:
                same = connection.scalar(select(table.c.rounds).where(mine, table.c.first_round == first))
                if same is not None and dumps(same) == text:
                    return stored
                raise RoundsConflictError(
                    f"{self.database.where}: cell {cell.id} has {stored} rounds, so rounds from {first} on "
                    "do not continue it"
                )
            connection.execute(
                table.insert(),
                {
                    "study_id": study.id,
                    "cell_id": cell.id,
                    "first_round": first,
                    "size": len(chunk),
                    "rounds": chunk,
                },
            )
        return stored + len(chunk)

    def rounds(self, study: Study, cell: Cell) -> list[dict[str, Any]]:
        """Every stored round of a cell, in order."""
        query = (
            select(RoundChunkRow.rounds)
            .where(RoundChunkRow.study_id == study.id, RoundChunkRow.cell_id == cell.id)
            .order_by(RoundChunkRow.first_round)
        )
        with self.database.read() as session:
            return [each for chunk in session.scalars(query) for each in chunk]

    def save_timing(self, study: Study, cell: Cell, timing: Timing) -> None:
        """Store what the rounds say about one route, in place of an earlier statement."""
        self.save_timings(study, cell, [timing])

    def save_timings(self, study: Study, cell: Cell, timings: Iterable[Timing]) -> None:
        """Store what the rounds say about several routes, in place of earlier statements."""
        rows = [
            {
                "study_id": study.id,
                "cell_id": cell.id,
                "route": timing.route,
                "rounds": timing.rounds,
                "above": timing.above,
                "below": timing.below,
                "run_us": timing.run_us,
                "host_us": timing.host_us,
                "prepare_us": timing.prepare_us,
                "summary": dict(timing.summary),
                "updated_at": utc_now(),
            }
            for timing in timings
        ]
        if rows:
            with self.database.write() as connection:
                self._put(connection, TimingRow, ("study_id", "cell_id", "route"), rows)

    def timings(self, study: Study, cell: Cell) -> list[Timing]:
        """The stored statements about a cell's routes, by route."""
        query = (
            select(TimingRow)
            .where(TimingRow.study_id == study.id, TimingRow.cell_id == cell.id)
            .order_by(TimingRow.route)
        )
        with self.database.read() as session:
            return [_timing(row) for row in session.scalars(query)]

    def all_timings(self, study: Study) -> dict[str, list[Timing]]:
        """:meth:`timings` of every cell, by cell id."""
        query = select(TimingRow).where(TimingRow.study_id == study.id).order_by(TimingRow.route)
        found: dict[str, list[Timing]] = {}
        with self.database.read() as session:
            for row in session.scalars(query):
                found.setdefault(row.cell_id, []).append(_timing(row))
        return found

    def save_decision(self, study: Study, cell: Cell, decision: Decision) -> None:
        """Store a cell's answer, in place of an earlier one."""
        row = {
            "study_id": study.id,
            "cell_id": cell.id,
            "route": decision.route,
            "reason": decision.reason.value,
            "detail": decision.detail,
            "speedup_low": decision.speedup_low,
            "speedup": decision.speedup,
            "vs_stock": decision.vs_stock,
            "updated_at": utc_now(),
        }
        with self.database.write() as connection:
            self._put(connection, DecisionRow, ("study_id", "cell_id"), [row])

    def decisions(self, study: Study) -> dict[str, Decision]:
        """Every answer of a study, by cell id."""
        with self.database.read() as session:
            rows = session.scalars(select(DecisionRow).where(DecisionRow.study_id == study.id))
            return {
                row.cell_id: Decision(
                    route=row.route,
                    reason=Reason(row.reason),
                    detail=row.detail,
                    speedup_low=row.speedup_low,
                    speedup=row.speedup,
                    vs_stock=row.vs_stock,
                )
                for row in rows
            }

    # -- trials

    def begin_trial(self, study: Study, cell: Cell, optuna_number: int, optuna_id: int) -> TrialRecord:
        """Note that Optuna's trial ``optuna_number`` now runs this cell. A cell has one row, its latest.

        One that is still ``running`` belonged to a process that died: that counts as a kill and a retry.
        """
        table = _table(TrialRow)
        mine = and_(table.c.study_id == study.id, table.c.cell_id == cell.id)
        with self.database.write() as connection:
            last = connection.execute(
                select(table.c.state, table.c.kills, table.c.retries).where(mine)
            ).first()
            killed = last is not None and last.state == TrialState.RUNNING.value
            kills = (last.kills if last else 0) + killed
            retries = last.retries + 1 if last else 0
            row = {
                "study_id": study.id,
                "cell_id": cell.id,
                "optuna_number": optuna_number,
                "optuna_id": optuna_id,
                "state": TrialState.RUNNING.value,
                "kills": kills,
                "retries": retries,
                "started_at": utc_now(),
                "finished_at": None,
            }
            self._put(connection, TrialRow, ("study_id", "cell_id"), [row])
        return TrialRecord(cell.id, optuna_number, optuna_id, TrialState.RUNNING, kills, retries)

    def finish_trial(self, study: Study, cell: Cell, state: TrialState) -> None:
        """Note how the cell's latest trial ended; store its rows first and tell Optuna after."""
        table = _table(TrialRow)
        mine = and_(table.c.study_id == study.id, table.c.cell_id == cell.id)
        with self.database.write() as connection:
            connection.execute(update(table).where(mine).values(state=state.value, finished_at=utc_now()))

    def trials(self, study: Study) -> dict[str, TrialRecord]:
        """The latest trial of every cell that had one, by cell id."""
        with self.database.read() as session:
            rows = session.scalars(select(TrialRow).where(TrialRow.study_id == study.id))
            return {
                row.cell_id: TrialRecord(
                    row.cell_id,
                    row.optuna_number,
                    row.optuna_id,
                    TrialState(row.state),
                    row.kills,
                    row.retries,
                )
                for row in rows
            }

    # -- self-test, quarantine, exports, counts

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
        column, cell_id = _split(target)
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
            self._put(connection, QuarantineRow, _QUARANTINE_KEY, [row])
        self._known_columns.add(column.id)

    def lift_quarantine(self, fingerprint: Fingerprint, target: Column | Cell, route: str) -> bool:
        """Take it back; False if there was none."""
        column, cell_id = _split(target)
        statement = delete(QuarantineRow).where(
            _on(QuarantineRow, fingerprint),
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
            .where(_on(QuarantineRow, fingerprint))
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
                _table(ExportRow).insert(),
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
        proofs = and_(_on(ProofRow, study.fingerprint), ProofRow.column_id.in_(columns))
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

    # -- statements

    def _add(self, connection: Connection, model: type[Base], **row: Any) -> bool:
        """Insert unless the key is there; whether it was inserted."""
        statement = self._insert(_table(model)).on_conflict_do_nothing()
        return connection.execute(statement, row).rowcount > 0

    def _put(
        self, connection: Connection, model: type[Base], key: Sequence[str], rows: list[dict[str, Any]]
    ) -> None:
        """Insert, or replace everything but the key."""
        statement = self._insert(_table(model))
        statement = statement.on_conflict_do_update(
            index_elements=list(key),
            set_={name: statement.excluded[name] for name in rows[0] if name not in key},
        )
        connection.execute(statement, rows)

    def _add_column(self, connection: Connection, column: Column) -> None:
        if column.id in self._known_columns:
            return
        self._add(
            connection,
            ColumnRow,
            id=column.id,
            spec=column.to_dict(),
            num_qo_heads=column.shape.num_qo_heads,
            num_kv_heads=column.shape.num_kv_heads,
            head_dim=column.shape.head_dim,
            page_size=column.shape.page_size,
            kv_layout=str(column.shape.to_dict()["kv_layout"]),
            q_dtype=column.dtypes.q,
            kv_dtype=column.dtypes.kv,
            out_dtype=column.dtypes.out,
            q_len=column.q_len,
            batch_size=column.batch_size,
            max_context=column.max_context,
        )


_PROOF_KEY = (
    "hardware_id",
    "software_id",
    "column_id",
    "cell_id",
    "route",
    "route_version",
    "check_name",
    "check_version",
)
_QUARANTINE_KEY = ("hardware_id", "software_id", "column_id", "cell_id", "route")


def _table(model: type[Base]) -> Table:
    table = model.__table__
    assert isinstance(table, Table)
    return table


def _study_id(fingerprint: Fingerprint, space_name: str, space_digest: str, engine: str) -> str:
    return stable_id([fingerprint.hardware_id, fingerprint.software_id, space_name, space_digest, engine])


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _split(target: Column | Cell) -> tuple[Column, str]:
    return (target.column, target.id) if isinstance(target, Cell) else (target, WHOLE_COLUMN)


def _on(model: type[ProofRow] | type[QuarantineRow], fingerprint: Fingerprint) -> ColumnElement[bool]:
    return and_(model.hardware_id == fingerprint.hardware_id, model.software_id == fingerprint.software_id)


def _same_cell(model: type[DecisionRow]) -> ColumnElement[bool]:
    return and_(model.study_id == CellRow.study_id, model.cell_id == CellRow.cell_id)


def _counts(
    session: Session, name: InstrumentedAttribute[Any], condition: ColumnElement[bool]
) -> dict[str, int]:
    """Rows by the value of ``name``."""
    query = select(name, func.count()).where(condition).group_by(name).order_by(name)
    return {str(key): int(count) for key, count in session.execute(query)}


def _study(session: Session, row: StudyRow) -> Study:
    hardware = session.get_one(HardwareRow, row.hardware_id)
    software = session.get_one(SoftwareRow, row.software_id)
    facts = Facts(hardware.device, hardware.facts, software.facts, row.informative)
    return Study(
        id=row.id,
        fingerprint=Fingerprint(row.hardware_id, row.software_id, facts),
        space_name=row.space_name,
        space_digest=row.space_digest,
        engine=row.engine,
        objectives=tuple(row.objectives),
        margin=row.margin,
        multiplicity=row.multiplicity,
        unit=row.unit,
        seed=row.seed,
        code_version=row.code_version,
        created_at=row.created_at,
    )


def _timing(row: TimingRow) -> Timing:
    return Timing(
        route=row.route,
        rounds=row.rounds,
        above=row.above,
        below=row.below,
        run_us=row.run_us,
        host_us=row.host_us,
        prepare_us=row.prepare_us,
        summary=row.summary,
    )


def _result(row: ProofRow) -> CheckResult:
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
        requires=tuple(row.requires),
        limits=tuple(row.limits),
        placements=tuple(row.placements),
        slack=row.slack,
    )
