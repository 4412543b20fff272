"""Optuna's storage in the same database as ours. Optuna is imported here only, and only when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.store.errors import NewerSchemaError, one_line

if TYPE_CHECKING:
    from optuna.storages import RDBStorage

    from autotune.store.database import Database


def rdb_storage(database: Database) -> RDBStorage:
    """Open Optuna's storage: same file or server, same pragmas, its own tables, engine and connections.

    Keep the result and give it to ``optuna.create_study``; name the study ``Study.optuna_name``. Its
    transactions are apart from ours: store our rows first, then tell Optuna, so that a kill in between
    leaves a trial that is told again, never a told trial without rows. Call Optuna outside
    ``Database.write()``: inside, it would wait for our write lock until it times out. Wrap its calls in
    ``Database.translated()``. Open it under ``Database.lock()``: Optuna does not expect two processes to
    create its tables at once.

    An in-memory database cannot be shared: Optuna's part then is a second one.

    Raises:
        NewerSchemaError: Optuna's tables are of another version of Optuna.
        StoreError: as ``open_database``.
    """
    from optuna.storages import RDBStorage

    url = database.url.render_as_string(hide_password=False)
    with database.translated():
        try:
            storage = RDBStorage(url, engine_kwargs=database.engine_kwargs())
        except RuntimeError as error:
            if "schema" not in str(error):
                raise
            raise NewerSchemaError(f"{database.where}: {one_line(error)}") from error

    def close() -> None:
        # else they stay open until they are collected, and SQLite's log beside the file with them
        storage.remove_session()
        storage.engine.dispose()

    database.closing.append(close)
    return storage
