"""The statements that the parts of the repository share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, Table, and_
from sqlalchemy.dialects import postgresql, sqlite

from autotune.domain.cell import Cell, Column
from autotune.store.database import Database
from autotune.store.models import Base, ColumnRow, ProofRow, QuarantineRow
from autotune.store.records import Fingerprint

# ``cell_id`` of a row about a column as a whole: part of a unique key, so it cannot be NULL.
WHOLE_COLUMN = ""


class Statements:
    """One database, and the inserts that SQLite and PostgreSQL both know."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert
        self._known_columns: set[str] = set()
        self._round_counts: dict[str, dict[str, int]] = {}  # of a study's cells, by their ids
        self._upserts: dict[type[Base], Executable] = {}

    def _add(self, connection: Connection, model: type[Base], **row: Any) -> bool:
        """Insert unless the key is there; whether it was inserted."""
        statement = self._insert(table_of(model)).on_conflict_do_nothing()
        # without the option SQLAlchemy does not keep an INSERT's row count on every driver
        done = connection.execute(statement, row, execution_options={"preserve_rowcount": True})
        return done.rowcount > 0

    def _put(
        self,
        connection: Connection,
        model: type[Base],
        key: Sequence[str],
        rows: list[dict[str, Any]],
        only_if: Callable[[Table, Any], ColumnElement[bool]] | None = None,
    ) -> None:
        """Insert, or replace everything but the key.

        Args:
            only_if: condition for replacing, from the table and the new row (``excluded``); None: always.
        """
        statement = self._upserts.get(model)
        if statement is None:  # building one costs more than executing it
            table = table_of(model)
            insert = self._insert(table)
            statement = insert.on_conflict_do_update(
                index_elements=list(key),
                set_={name: insert.excluded[name] for name in rows[0] if name not in key},
                where=None if only_if is None else only_if(table, insert.excluded),
            )
            self._upserts[model] = statement
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


def table_of(model: type[Base]) -> Table:
    """The Core table of a model: bulk statements skip the ORM's bookkeeping."""
    table = model.__table__
    assert isinstance(table, Table)
    return table


def split(target: Column | Cell) -> tuple[Column, str]:
    """Column and ``cell_id`` of what a row is about."""
    return (target.column, target.id) if isinstance(target, Cell) else (target, WHOLE_COLUMN)


def on(model: type[ProofRow] | type[QuarantineRow], fingerprint: Fingerprint) -> ColumnElement[bool]:
    """Rows of one fingerprint."""
    return and_(model.hardware_id == fingerprint.hardware_id, model.software_id == fingerprint.software_id)
