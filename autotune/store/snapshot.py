"""A copy of an SQLite file that may be in use, with nothing left beside the original."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def snapshot(path: Path, copy: Path) -> None:
    """Write what is committed in ``path``, its write-ahead log included, to the new file ``copy``.

    Raises:
        OSError, sqlite3.Error: ``path`` cannot be read or ``copy`` not written.
    """
    log = path.with_name(f"{path.name}-wal")
    # a reader of a database that nobody has open would make its log, and leave it there
    if not log.exists():
        before = _stamp(path)
        shutil.copyfile(path, copy)
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            # as a backup would, this tells what is no database
            connection.execute("PRAGMA schema_version")
        if not log.exists() and _stamp(path) == before:
            return
        copy.unlink()
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with (
        contextlib.closing(sqlite3.connect(uri, uri=True)) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
