"""SQLite's own side: what a file is, how its connections are set up, how it is backed up."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from autotune.store.errors import (
    FileReplacedError,
    ForeignDatabaseError,
    NotADatabaseError,
    NotWritableError,
    from_driver,
    from_os,
)

MAGIC = b"SQLite format 3\x00"
VERSION_TABLE = "autotune_alembic_version"

# Optuna 5's tables; a file that holds only these was made by Optuna and may become ours as well.
OPTUNA_TABLES = frozenset(
    {
        "alembic_version",
        "studies",
        "study_directions",
        "study_user_attributes",
        "study_system_attributes",
        "trials",
        "trial_user_attributes",
        "trial_system_attributes",
        "trial_params",
        "trial_values",
        "trial_intermediate_values",
        "trial_heartbeats",
        "version_info",
    }
)


class TunedConnection(sqlite3.Connection):
    """A connection that waits for locks, enforces foreign keys and writes through a WAL.

    Given as ``connect_args={"factory": TunedConnection}`` to our engine and to Optuna's alike, so that both
    are tuned before their first statement and no other SQLite engine of the process is touched. WAL with
    ``synchronous=NORMAL`` keeps every commit through a kill -9; a power cut may lose the last ones, never
    the file. It is what makes an Optuna trial cost 9 ms instead of 70.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._use_wal(time.monotonic() + kwargs.get("timeout", 5.0))
        self.execute("PRAGMA synchronous=NORMAL").close()
        self.execute("PRAGMA foreign_keys=ON").close()

    def _use_wal(self, deadline: float) -> None:
        # Switching a file to WAL needs it alone and, unlike every other statement, does not wait for that:
        # two processes that create one database together would see "database is locked".
        while True:
            try:
                mode = self.execute("PRAGMA journal_mode").fetchone()[0]
                if mode not in ("wal", "memory"):
                    self.execute("PRAGMA journal_mode=WAL").close()
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)


class OpenedFile:
    """Notices that a path no longer leads to the file that was opened.

    SQLite writes on into a file that was deleted or replaced, and reports success: all of it would be lost.
    The write-ahead log stays as long as a connection is open, and one of ours always is once it was noted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Remember device and inode of the file and of its log, while a connection is open on them."""
        for name in (str(self._path), f"{self._path}-wal"):
            if name not in self._known and (found := _identity(name)) is not None:
                self._known[name] = found

    def check(self) -> None:
        """Compare with what was noted; a call of ``stat`` each.

        Raises:
            FileReplacedError: one is missing, or another file.
        """
        for name, known in self._known.items():
            now = _identity(name)
            if now != known:
                what = "was deleted" if now is None else "was replaced by another file"
                raise FileReplacedError(
                    f"{name}: {what} while the database was in use; nothing is stored any more, put it back "
                    "or run the same command again"
                )


def _identity(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)  # noqa: PTH116 - for every transaction
    except OSError:
        return None
    return found.st_dev, found.st_ino


def check_file(path: Path, ours: frozenset[str], timeout_s: float) -> None:
    """Refuse a file that is not a database of ours or Optuna's, before anything in it is changed.

    A file that does not exist, an empty one and an empty database are fine.

    Raises:
        NotWritableError: the folder is missing, or file or folder cannot be written.
        NotADatabaseError, ForeignDatabaseError, DatabaseBusyError: what the file is instead.
    """
    folder = path.parent
    if not folder.is_dir():
        raise NotWritableError(
            f"{path}: the folder {folder} does not exist; create it or name another database"
        )
    if path.is_dir():
        raise NotADatabaseError(f"{path}: is a folder; name a file")
    try:
        size = path.stat().st_size if path.exists() else None
        head = b""
        if size:
            with path.open("rb") as stream:
                head = stream.read(len(MAGIC))
    except OSError as error:
        raise from_os(error, str(path)) from error
    if head and head != MAGIC:
        raise NotADatabaseError(f"{path}: is not an SQLite database; nothing was changed, name another file")
    # the write-ahead log and the lock lie beside the file
    for target in (path, folder) if size is not None else (folder,):
        if not os.access(target, os.W_OK):
            raise NotWritableError(
                f"{target}: cannot be written; change its permissions or name another database"
            )
    if not head:
        return
    tables = _tables(path, timeout_s)
    if VERSION_TABLE in tables:
        return
    foreign = sorted((tables - OPTUNA_TABLES) | (tables & ours))
    if foreign:
        raise ForeignDatabaseError(
            f"{path}: belongs to another program (it has a table {foreign[0]!r}); "
            "nothing was changed, name another file"
        )


def _tables(path: Path, timeout_s: float) -> frozenset[str]:
    """Names of the tables; nothing is changed, except that SQLite recovers from a crash as for any reader."""
    try:
        uri = f"file:{quote(str(path.resolve()))}?mode=rw"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=timeout_s)) as connection:
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return frozenset(name for (name,) in rows if not name.startswith("sqlite_"))
    except sqlite3.Error as error:
        raise from_driver(error, str(path)) from error


def backup(path: Path, revision: str) -> Path:
    """Copy the database, its write-ahead log included, to ``<file>.backup-<revision>``.

    An earlier backup is never overwritten (``.2``, ``.3``, ... are appended), and a copy that could not be
    completed leaves nothing behind.

    Raises:
        DiskFullError, NotWritableError, NotADatabaseError, DatabaseBusyError: no backup was made.
    """
    target = next(name for name in _backup_names(path, revision) if not name.exists())
    partial = target.with_name(target.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        with (
            contextlib.closing(sqlite3.connect(path)) as source,
            contextlib.closing(sqlite3.connect(partial)) as copy,
        ):
            source.backup(copy)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(target)
    except sqlite3.Error as error:
        partial.unlink(missing_ok=True)
        raise from_driver(error, f"{target} (backup before a schema change)") from error
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise from_os(error, f"{target} (backup before a schema change)") from error
    return target


def _backup_names(path: Path, revision: str) -> Iterator[Path]:
    yield path.with_name(f"{path.name}.backup-{revision}")
    number = 2
    while True:
        yield path.with_name(f"{path.name}.backup-{revision}.{number}")
        number += 1
