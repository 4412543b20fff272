"""Bring a database to this version's schema, through the migrations in ``db/``.

Each upgrade is one transaction, whatever the number of steps: a crash leaves the old schema. An SQLite file
that holds data is copied first. ``python -m autotune.store.migrations MESSAGE`` drafts the next step from the
difference between the models and the newest schema.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, inspect, text

from autotune.store.errors import (
    DatabaseBusyError,
    ForeignDatabaseError,
    NewerSchemaError,
    NotADatabaseError,
    NotWritableError,
    StoreError,
    StudyLockedError,
    one_line,
)
from autotune.store.lock import file_lock
from autotune.store.models import Base
from autotune.store.sqlite import VERSION_TABLE, backup

if TYPE_CHECKING:
    from autotune.store.database import Database

# Any number will do, as long as every version of this program uses it.
_MIGRATION_LOCK = 0x6175746F74756E65


def script_folder() -> Path:
    """``db/`` of the repository, else the copy in the installed package.

    The repository's comes first: an editable install keeps a stale copy among the package data.

    Raises:
        StoreError: the installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent
    found = [checkout / "db"] if (checkout / "pyproject.toml").is_file() else []
    for folder in [*found, package / "_data" / "db"]:
        if (folder / "env.py").is_file():
            return folder
    raise StoreError(f"the migrations are missing from this installation ({package}); install it again")


def config(folder: Path, connection: Connection) -> Config:
    """Alembic's configuration, without a file; ``db/env.py`` takes the connection from its attributes."""
    result = Config()
    result.set_main_option("script_location", str(folder).replace("%", "%%"))
    result.attributes["connection"] = connection
    return result


def revision_of(connection: Connection) -> str | None:
    """The schema revision of a database; None before the first migration."""
    return MigrationContext.configure(
        connection, opts={"version_table": VERSION_TABLE}
    ).get_current_revision()


def migrate(database: Database, folder: Path | None = None) -> None:
    """Create or upgrade the schema; does nothing to a current database.

    Raises:
        NewerSchemaError: the database knows a revision that this version does not.
        ForeignDatabaseError: tables of our names, but not ours (PostgreSQL).
        DatabaseBusyError: an upgrade is needed while a run holds the database.
        DiskFullError, NotWritableError: no backup could be made, or this role may not change the schema
            (PostgreSQL); it is as it was.
    """
    folder = folder or script_folder()
    script = ScriptDirectory(str(folder))
    head = script.get_current_head()
    with database.read_connection() as connection:
        if _is_current(database, connection, script, head):
            return
    if database.path is not None:
        _migrate_file(database, database.path, folder, script, head)
        return
    found: str | None = None
    try:
        with database.write() as connection:
            if not database.is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            if not _is_current(database, connection, script, head):
                found = revision_of(connection)
                _upgrade(connection, folder)
    except NotWritableError as error:
        raise NotWritableError(_not_allowed(database.where, found, head)) from error


def _not_allowed(where: str, found: str | None, head: str | None) -> str:
    """For a role that may not change the schema: what is there, what is needed, and who can do it."""
    if found is None:
        return (
            f"{where}: has no tables yet and this role may not make them; use a role that may create tables"
        )
    return (
        f"{where}: has schema {found}, this version needs {head}, and this role may not upgrade it; open it "
        "once with this version as the role that owns its tables (autotune doctor --db URL does)"
    )


def _is_current(
    database: Database, connection: Connection, script: ScriptDirectory, head: str | None
) -> bool:
    revision = revision_of(connection)
    if revision is None:
        taken = set(inspect(connection).get_table_names()) & set(Base.metadata.tables)
        if taken:
            raise ForeignDatabaseError(
                f"{database.where}: has a table {min(taken)!r} that is not of this program; "
                "nothing was changed, name another database"
            )
        return False
    if revision == head:
        return True
    try:
        script.get_revision(revision)
    except CommandError:
        raise NewerSchemaError(
            f"{database.where}: written by a newer version (schema {revision}, this one knows up to {head}); "
            "nothing was changed, upgrade the program or name another database"
        ) from None
    return False


def _migrate_file(
    database: Database, path: Path, folder: Path, script: ScriptDirectory, head: str | None
) -> None:
    """Under the run's own lock, so that nobody writes between the backup and the upgrade."""
    deadline = time.monotonic() + database.busy_timeout_s
    while True:
        try:
            with file_lock(path, "schema upgrade"):
                with database.read_connection() as connection:
                    if _is_current(database, connection, script, head):
                        return
                    revision = revision_of(connection)
                if revision is not None:
                    backup(path, revision)
                with database.write(foreign_keys=False) as connection:
                    _upgrade(connection, folder)
                    if connection.exec_driver_sql("PRAGMA foreign_key_check").first() is not None:
                        raise NotADatabaseError(
                            f"{path}: rows without their parent; the schema was left as it was"
                        )
                return
        except StudyLockedError as error:
            if time.monotonic() > deadline:
                raise DatabaseBusyError(f"{one_line(error)} (its schema must be upgraded first)") from None
        # another process may just be creating it: then there is nothing left to do
        time.sleep(0.05)
        with database.read_connection() as connection:
            if _is_current(database, connection, script, head):
                return


def _upgrade(connection: Connection, folder: Path) -> None:
    try:
        command.upgrade(config(folder, connection), "head")
    except CommandError as error:
        raise StoreError(f"the migrations in {folder} are inconsistent: {one_line(error)}") from error


def draft(message: str) -> None:
    """Write the next migration, autogenerated, into ``db/versions``; to be read and mended by a person."""
    from autotune.store.database import open_database

    folder = script_folder()
    number = len(list((folder / "versions").glob("[0-9]*.py"))) + 1
    with open_database("sqlite://") as database, database.write() as connection:
        command.revision(config(folder, connection), message, autogenerate=True, rev_id=f"{number:04d}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m autotune.store.migrations MESSAGE")
    draft(sys.argv[1])
