"""What can go wrong with the database, one clear line each, and the mapping from driver errors."""

from __future__ import annotations

import errno
import sqlite3

from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError


class StoreError(RuntimeError):
    """Base of everything this package raises on purpose; the message is one line for a person."""


class BadUrlError(StoreError):
    """The database URL has no meaning here."""


class DriverMissingError(StoreError):
    """The URL needs a driver that is not installed."""


class ServerUnreachableError(StoreError):
    """No connection to the PostgreSQL server, or it was lost."""


class NotADatabaseError(StoreError):
    """The file is not an SQLite database, or it is damaged."""


class ForeignDatabaseError(StoreError):
    """A database of some other program: nothing of it was changed."""


class NewerSchemaError(StoreError):
    """Written by a newer version of this package: nothing of it was changed."""


class DatabaseBusyError(StoreError):
    """Another process held the database's write lock for longer than the busy timeout."""


class StudyLockedError(StoreError):
    """Another run holds the study; two at once would measure each other."""


class DiskFullError(StoreError):
    """No space left; the call that raised stored nothing, everything before it is intact."""


class NotWritableError(StoreError):
    """The file or its folder cannot be written (or read, or does not exist)."""


class StudyMismatchError(StoreError):
    """A study exists with other fixed fields; its error rate would not hold."""


class FileReplacedError(StoreError):
    """The database's file, or its write-ahead log, was removed or replaced while it was open."""


class UnknownStudyError(StoreError):
    """No study of that id."""


class RoundsConflictError(StoreError):
    """Rounds that do not continue the stored ones."""


# https://www.postgresql.org/docs/current/errcodes-appendix.html
_UNREACHABLE_STATES = ("08", "28", "3D", "53300", "57P")
_FULL_STATES = ("53100",)
_READ_ONLY_STATES = ("25006", "42501")
_BUSY_STATES = ("55P03", "40P01", "40001")
_MISSING_STATES = ("42P01", "42703", "3F000")


def one_line(error: BaseException) -> str:
    """First line of a driver's message: the rest is SQL and parameters."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def from_os(error: OSError, where: str) -> StoreError:
    """An error of the operating system on the database's file, its folder, lock or backup."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFullError(f"{where}: no space left on the disk; free some and run the same command again")
    return NotWritableError(f"{where}: {error.strerror or one_line(error)}")


def from_driver(error: BaseException, where: str) -> StoreError:
    """The store's error for one of SQLAlchemy or of a driver.

    Args:
        where: the database as a person knows it: a file, or a URL without its password.
    """
    if isinstance(error, StoreError):
        return error
    original: BaseException = error
    if isinstance(error, DBAPIError) and error.orig is not None:
        original = error.orig
    text = one_line(original)
    if isinstance(original, OverflowError):
        return StoreError(f"{where}: a number does not fit into 64 bits: {text}")
    state = getattr(original, "sqlstate", None)
    if state is not None:
        return _from_sqlstate(state, text, where)
    if isinstance(original, sqlite3.Error):
        return _from_sqlite(text, where)
    if isinstance(error, IntegrityError):
        return StoreError(f"{where}: the database refused a row: {text}")
    if isinstance(error, DBAPIError) and type(error).__name__ in ("OperationalError", "InterfaceError"):
        # psycopg gives no SQLSTATE when there was no connection or it broke
        return ServerUnreachableError(f"{where}: {text}")
    return StoreError(f"{where}: {text}")


def _from_sqlstate(state: str, text: str, where: str) -> StoreError:
    if state.startswith(_FULL_STATES):
        return DiskFullError(f"{where}: the server's disk is full; free some and run the same command again")
    if state.startswith(_READ_ONLY_STATES):
        return NotWritableError(f"{where}: {text}")
    if state.startswith(_BUSY_STATES):
        return DatabaseBusyError(f"{where}: {text}")
    if state.startswith(_UNREACHABLE_STATES):
        return ServerUnreachableError(f"{where}: {text}")
    if state.startswith(_MISSING_STATES):
        return NotADatabaseError(f"{where}: its tables are not those of this program: {text}")
    return StoreError(f"{where}: {text}")


def _from_sqlite(text: str, where: str) -> StoreError:
    # Python 3.10 has no sqlite_errorcode, so the messages of sqlite3ErrStr it is; they are stable.
    low = text.lower()
    if "disk is full" in low:
        return DiskFullError(f"{where}: no space left on the disk; free some and run the same command again")
    if "readonly" in low or "unable to open" in low:
        return NotWritableError(f"{where}: cannot be written ({text})")
    if "locked" in low:
        return DatabaseBusyError(
            f"{where}: another program holds it ({text}); wait for it, or name another database"
        )
    if "not a database" in low or "malformed" in low:
        return NotADatabaseError(f"{where}: not an SQLite database, or a damaged one ({text})")
    if "no such table" in low or "no such column" in low:
        return NotADatabaseError(f"{where}: its tables are not those of this program ({text})")
    if "disk i/o error" in low:
        # SQLite says this for a write that the system cut short, a full quota or file limit included
        return DiskFullError(
            f"{where}: a write failed ({text}); check the disk and run the same command again"
        )
    return StoreError(f"{where}: {text}")


def is_driver_error(error: BaseException) -> bool:
    """Whether ``error`` comes from SQLAlchemy or a driver, itself or as the cause."""
    # Optuna wraps them
    kinds = (SQLAlchemyError, sqlite3.Error, OverflowError)
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)
