"""Opening a database: URL, engine, schema, transactions, and errors in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import URL, Connection, Engine, StaticPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session

from autotune.store.errors import (
    BadUrlError,
    DriverMissingError,
    StoreError,
    StudyLockedError,
    from_driver,
    is_driver_error,
)
from autotune.store.lock import advisory_lock, file_lock
from autotune.store.migrations import migrate
from autotune.store.models import Base
from autotune.store.sqlite import OpenedFile, TunedConnection, check_file
from autotune.store.types import dumps

_WRITE = "autotune_write"
_CONNECT_TIMEOUT_S = 10


def open_database(url: str, *, busy_timeout_s: float = 30.0, migrations: Path | None = None) -> Database:
    """Open ``sqlite:///FILE``, ``postgresql://USER@HOST/NAME`` or, for tests, ``sqlite://`` (in memory).

    An empty database gets the schema; an older one is upgraded, an SQLite file after a backup to
    ``<file>.backup-<revision>``.

    Args:
        busy_timeout_s: how long a call waits for another process's write lock.
        migrations: another migrations folder than the package's.

    Raises:
        StoreError: one of its subclasses, with one clear line; nothing was changed.
    """
    parsed = _parse(url)
    database = Database(parsed, busy_timeout_s)
    try:
        if database.path is not None:
            check_file(database.path, frozenset(Base.metadata.tables), busy_timeout_s)
        with database.translated():
            migrate(database, migrations)
        database.note_place()
    except BaseException:
        database.close()
        raise
    return database


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number
        hint = f"; did you mean 'sqlite:///{url}'?" if "://" not in url and url else ""
        raise BadUrlError(
            f"{url!r} is not a database URL: sqlite:///FILE or postgresql://USER@HOST/NAME{hint}"
        ) from None
    backend = parsed.drivername.partition("+")[0]
    if backend in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    shown = parsed.render_as_string(hide_password=True)
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise BadUrlError(
            f"{shown}: {backend!r} is not supported: sqlite:///FILE or postgresql://USER@HOST/NAME"
        )
    if parsed.host or parsed.query or (parsed.database or "").startswith("file:"):
        raise BadUrlError(
            f"{shown}: write sqlite:///FILE (three slashes before a relative path, four before an absolute "
            "one), without options"
        )
    return parsed


class Database:
    """An open evidence database; a context manager. Safe to use from several threads.

    Attributes:
        url: as SQLAlchemy takes it, password included.
        where: for messages: the file, or the URL without its password.
        path: the SQLite file; None for PostgreSQL and in memory.
        busy_timeout_s: how long a call waits for another process's write lock.
        closing: what else is to be closed with it, last first; an SQLAlchemy error there is passed over.
    """

    def __init__(self, url: URL, busy_timeout_s: float) -> None:
        self.url = url
        self.busy_timeout_s = busy_timeout_s
        self.closing: list[Callable[[], None]] = []
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self.in_memory = self.is_sqlite and url.database in (None, "", ":memory:")
        self.path = Path(url.database or "") if self.is_sqlite and not self.in_memory else None
        self.where = str(self.path) if self.path else url.render_as_string(hide_password=True)
        self._held: set[str] = set()
        self._opened = OpenedFile(self.path) if self.path is not None else None
        try:
            self.engine: Engine = create_engine(url, json_serializer=dumps, **self.engine_kwargs())
        except ImportError as error:
            raise DriverMissingError(
                f"{self.where}: PostgreSQL needs psycopg: pip install 'kernel-autotune[postgres]'"
            ) from error
        if self.is_sqlite:
            event.listen(self.engine, "connect", _own_transactions)
            event.listen(self.engine, "begin", _begin)

    def engine_kwargs(self) -> dict[str, Any]:
        """What any engine on this database is created with; Optuna's too."""
        if not self.is_sqlite:
            # a server that restarted in a long run costs one reconnect, not the run
            return {"connect_args": {"connect_timeout": _CONNECT_TIMEOUT_S}, "pool_pre_ping": True}
        connect: dict[str, Any] = {"factory": TunedConnection, "timeout": self.busy_timeout_s}
        if self.in_memory:
            return {"connect_args": {**connect, "check_same_thread": False}, "poolclass": StaticPool}
        return {"connect_args": connect}

    def note_place(self) -> None:
        """Remember which file this is; called with a connection open."""
        if self._opened is not None:
            self._opened.note()

    def check_place(self) -> None:
        """See that the SQLite file is where it was opened; done by every read and write.

        Raises:
            FileReplacedError: it was deleted or replaced meanwhile.
        """
        if self._opened is not None:
            self._opened.check()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turn database errors inside into :class:`StoreError`. Wrap Optuna calls in it as well."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            if not is_driver_error(error):
                raise
            cause = error.__cause__
            inner = cause if cause is not None and is_driver_error(cause) else error
            raise from_driver(inner, self.where) from error

    @contextlib.contextmanager
    def read_connection(self) -> Iterator[Connection]:
        """A connection for reading; its snapshot ends with the block."""
        self.check_place()
        with self.translated(), self.engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:
        """A session for reading; its snapshot ends with the block."""
        self.check_place()
        with self.translated(), Session(self.engine) as session:
            yield session

    @contextlib.contextmanager
    def write(self, *, foreign_keys: bool = True) -> Iterator[Connection]:
        """One transaction: committed at the end of the block, rolled back if it raises.

        SQLite's write lock is taken at once (BEGIN IMMEDIATE): a transaction that reads first and then writes
        would be refused without waiting. Never call Optuna inside.

        Args:
            foreign_keys: False lets a migration rebuild SQLite tables that others refer to.

        Raises:
            FileReplacedError: the SQLite file was deleted or replaced, before the block or in it.
        """
        self.check_place()
        with self.translated(), self.engine.connect().execution_options(**{_WRITE: True}) as connection:
            if foreign_keys or not self.is_sqlite:
                with connection.begin():
                    yield connection
                    self.note_place()
                    self.check_place()
                return
            driver: Any = connection.connection.dbapi_connection
            driver.execute("PRAGMA foreign_keys=OFF").close()  # no effect inside a transaction
            try:
                with connection.begin():
                    yield connection
            finally:
                driver.execute("PRAGMA foreign_keys=ON").close()

    @contextlib.contextmanager
    def lock(self, study_id: str) -> Iterator[None]:
        """Be the only run: on the SQLite file, or on this study of a PostgreSQL server.

        Released when the process ends, however it ends.

        Raises:
            StudyLockedError: there is another one; the message says who, where and since when.
        """
        if self.path is not None:
            with file_lock(self.path, f"study {study_id}"):
                yield
        elif not self.is_sqlite:
            with contextlib.ExitStack() as held:
                with self.translated():
                    held.enter_context(advisory_lock(self.engine, self.where, study_id))
                yield
        else:
            with _memory_lock(self._held, study_id):
                yield

    def close(self) -> None:
        """Close every connection, Optuna's too."""
        while self.closing:
            with contextlib.suppress(SQLAlchemyError):
                self.closing.pop()()
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def _memory_lock(held: set[str], study_id: str) -> Iterator[None]:
    if study_id in held:
        raise StudyLockedError(
            f"in-memory database: study {study_id} is in use by another run of this process"
        )
    held.add(study_id)
    try:
        yield
    finally:
        held.discard(study_id)


def _own_transactions(connection: Any, record: Any) -> None:
    # sqlite3 begins a transaction only before an INSERT, UPDATE or DELETE: a schema change would be committed
    # statement by statement. We begin them ourselves.
    connection.isolation_level = None


def _begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
