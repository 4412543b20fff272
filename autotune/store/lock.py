"""One run at a time: an exclusive lock that dies with its holder.

SQLite: ``flock`` on ``<file>.lock``; the kernel releases it when the process ends, however it ends. It
covers the file, since SQLite has one writer. PostgreSQL: a session-level advisory lock on a connection of
its own, one per study; the server releases it when the connection ends.

Children must be started with ``exec`` (as a forkserver is): one that was merely forked would share the lock's
file and hold it after its parent is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from autotune.store.errors import StudyLockedError, from_os
from autotune.store.types import utc_now


@contextlib.contextmanager
def file_lock(path: Path, purpose: str) -> Iterator[None]:
    """Hold ``<path>.lock``.

    Args:
        purpose: shown to whoever is refused, such as ``study 3f9c``.

    Raises:
        StudyLockedError: another process, or another holder in this one, has it.
        NotWritableError, DiskFullError: the lock file cannot be made.
    """
    # of the file itself: a link to it is another name, not another database
    name = Path(f"{os.path.realpath(path)}.lock")
    try:
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise from_os(error, str(name)) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StudyLockedError(_refusal(str(path), _holder(handle))) from None
        except OSError as error:
            raise from_os(error, str(name)) from error
        # only for people: a full disk must not keep the lock from being taken
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(_me(purpose)).encode(), 0)
        yield
        # The file stays: removing it would let two processes lock two files of the same name.
    finally:
        os.close(handle)


def _me(purpose: str) -> dict[str, str]:
    return {
        "who": f"pid {os.getpid()} on {socket.gethostname()}",
        "what": purpose,
        "since": utc_now().isoformat(timespec="seconds"),
    }


def _holder(handle: int) -> str:
    try:
        data = json.loads(os.pread(handle, 4096, 0))
        return f"{data['who']}, {data['what']}, since {data['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "holder unknown"


def _refusal(where: str, holder: str) -> str:
    return f"{where}: in use by another run ({holder}); wait for it to end, or name another database"


@contextlib.contextmanager
def advisory_lock(engine: Engine, where: str, study_id: str) -> Iterator[None]:
    """Hold PostgreSQL's advisory lock of ``study_id``.

    Raises:
        StudyLockedError: another session has it.
    """
    digest = hashlib.sha256(f"autotune study {study_id}".encode()).digest()
    # two 32-bit keys, which pg_locks shows as classid and objid
    first = int.from_bytes(digest[:4], "big", signed=True)
    second = int.from_bytes(digest[4:8], "big", signed=True)
    keys = {"first": first, "second": second}
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    try:
        me = _me(study_id)["who"][:63]
        connection.execute(text("SELECT set_config('application_name', :name, false)"), {"name": me})
        if not connection.scalar(text("SELECT pg_try_advisory_lock(:first, :second)"), keys):
            raise StudyLockedError(_refusal(f"{where}, study {study_id}", _session(engine, first, second)))
        try:
            yield
        finally:
            # Said, and not left to the end of the connection: the server sees that some time after we close
            # it, and until then the next run is refused. A server that has gone holds no lock.
            with contextlib.suppress(SQLAlchemyError):
                connection.execute(text("SELECT pg_advisory_unlock(:first, :second)"), keys)
    finally:
        # out of the pool: it bears a holder's name
        connection.invalidate()
        connection.close()


def _session(engine: Engine, first: int, second: int) -> str:
    query = text(
        "SELECT a.application_name, a.query_start FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
        " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2"
        " AND l.classid::bigint = :first AND l.objid::bigint = :second"
    )
    unsigned = {"first": first % 2**32, "second": second % 2**32}
    with engine.connect() as connection:
        row = connection.execute(query, unsigned).first()
    if row is None or not row[0]:
        return "holder unknown"
    return f"{row[0]}, since {row[1].astimezone().isoformat(timespec='seconds')}"
