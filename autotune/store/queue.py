"""A study's queue of cells, and the trials that worked on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, select, update

from autotune.domain.cell import Cell, Column
from autotune.store.models import CellRow, ColumnRow, DecisionRow, TrialRow
from autotune.store.records import Study, StudyCell, TrialRecord, TrialState
from autotune.store.statements import Statements, table_of
from autotune.store.types import utc_now


class Queue(Statements):
    """Cells and their trials."""

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
                connection.execute(self._insert(table_of(CellRow)), list(new.values()))
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

    def begin_trial(self, study: Study, cell: Cell, optuna_number: int, optuna_id: int) -> TrialRecord:
        """Note that Optuna's trial ``optuna_number`` now runs this cell. A cell has one row, its latest.

        One that is still ``running`` belonged to a process that died: that counts as a kill and a retry.
        """
        table = table_of(TrialRow)
        mine = and_(table.c.study_id == study.id, table.c.cell_id == cell.id)
        with self.database.write() as connection:
            last = connection.execute(
                select(table.c.state, table.c.kills, table.c.retries, table.c.lost).where(mine)
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
        lost = last.lost if last else 0
        return TrialRecord(cell.id, optuna_number, optuna_id, TrialState.RUNNING, kills, retries, lost)

    def lose_chunk(self, study: Study, cell: Cell) -> TrialRecord:
        """Note that a child took a chunk of the cell's rounds with it and nobody was accused of it.

        The count survives restarts. Once :attr:`TrialRecord.given_up` holds, time the cell no more.

        Returns:
            The cell's trial, this loss included.

        Raises:
            ValueError: the cell has no trial.
        """
        table = table_of(TrialRow)
        mine = and_(table.c.study_id == study.id, table.c.cell_id == cell.id)
        with self.database.write() as connection:
            if connection.execute(update(table).where(mine).values(lost=table.c.lost + 1)).rowcount == 0:
                raise ValueError(f"cell {cell.id} has no trial to lose rounds of")
            return _record(connection.execute(select(table).where(mine)).one())

    def finish_trial(self, study: Study, cell: Cell, state: TrialState) -> None:
        """Note how the cell's latest trial ended; store its rows first and tell Optuna after.

        Raises:
            ValueError: the cell has no trial.
        """
        table = table_of(TrialRow)
        mine = and_(table.c.study_id == study.id, table.c.cell_id == cell.id)
        with self.database.write() as connection:
            values = {"state": state.value, "finished_at": utc_now()}
            if connection.execute(update(table).where(mine).values(values)).rowcount == 0:
                raise ValueError(f"cell {cell.id} has no trial to finish")

    def trials(self, study: Study) -> dict[str, TrialRecord]:
        """The latest trial of every cell that had one, by cell id."""
        with self.database.read() as session:
            rows = session.scalars(select(TrialRow).where(TrialRow.study_id == study.id))
            return {row.cell_id: _record(row) for row in rows}


def _record(row: Any) -> TrialRecord:
    state = TrialState(row.state)
    return TrialRecord(row.cell_id, row.optuna_number, row.optuna_id, state, row.kills, row.retries, row.lost)


def _same_cell(model: type[DecisionRow]) -> ColumnElement[bool]:
    """Join condition between a cell and its row in ``model``."""
    return and_(model.study_id == CellRow.study_id, model.cell_id == CellRow.cell_id)
