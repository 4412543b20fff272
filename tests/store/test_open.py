"""What ``open_database`` refuses, in one line, leaving everything as it was."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.store.database import open_database
from autotune.store.errors import (
    BadUrlError,
    DatabaseBusyError,
    DiskFullError,
    DriverMissingError,
    ForeignDatabaseError,
    NotADatabaseError,
    NotWritableError,
    ServerUnreachableError,
    StoreError,
    from_driver,
)
from autotune.store.repository import Repository


def _refused(url: str, kind: type[StoreError], words: str, busy_timeout_s: float = 0.1) -> str:
    with pytest.raises(kind, match=words) as caught, open_database(url, busy_timeout_s=busy_timeout_s):
        pass
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 300
    return text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "not a database URL"),
        ("autotune.db", "did you mean 'sqlite:///autotune.db'"),
        ("mysql://root@localhost/x", "'mysql' is not supported"),
        ("sqlite+aiosqlite:///x.db", "not supported"),
        ("sqlite://autotune.db", "three slashes"),
        ("sqlite:///x.db?mode=ro", "without options"),
        ("sqlite:///file:x.db", "three slashes"),
        ("postgresql://localhost:port/x", "not a database URL"),
        ("nonsense://x", "'nonsense' is not supported"),
    ],
)
def test_bad_url(url: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _refused(url, BadUrlError, words)
    assert list(tmp_path.iterdir()) == []


def test_a_password_is_never_shown() -> None:
    text = _refused("mysql://root:hunter2@localhost/x", BadUrlError, "not supported")
    assert "hunter2" not in text
    text = _refused("postgresql://u:hunter2@127.0.0.1:1/x", ServerUnreachableError, "127.0.0.1")
    assert "hunter2" not in text


def test_the_driver_is_missing() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from autotune.store.database import open_database\n"
        "from autotune.store.errors import DriverMissingError\n"
        "try: open_database('postgresql://localhost/x')\n"
        "except DriverMissingError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'kernel-autotune[postgres]'" in done.stdout
    assert DriverMissingError.__doc__


@pytest.mark.parametrize(
    "content",
    [
        b"schema: routing-table/1\n",
        b"\x00" * 5000,
        b"x",
        b"SQLite format 3",
        b"SQLite format 3\x00" + b"\xff" * 9000,
    ],
    ids=["text", "zeros", "byte", "cut", "garbage"],
)
def test_no_database(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(content)
    _refused(f"sqlite:///{path}", NotADatabaseError, "SQLite database")
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["a.db"]


def test_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    open_database(f"sqlite:///{path}").close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    _refused(f"sqlite:///{path}", NotADatabaseError, "malformed|damaged")


@pytest.mark.parametrize("table", ["cookies", "study", "hardware"])
def test_another_programs_database(table: str, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE TABLE {table} (x)")
    before = path.read_bytes()
    _refused(f"sqlite:///{path}", ForeignDatabaseError, f"table '{table}'.*nothing was changed")
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.db"]


@pytest.mark.postgres
def test_another_programs_tables_on_a_server(postgres_url: str) -> None:
    import psycopg

    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE invoices (x int)")
    open_database(
        postgres_url
    ).close()  # a server may hold other tables, as long as they are not named as ours
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DROP TABLE autotune_alembic_version")
    _refused(postgres_url, ForeignDatabaseError, "nothing was changed")


def test_a_folder(tmp_path: Path) -> None:
    _refused(f"sqlite:///{tmp_path}", NotADatabaseError, "is a folder")


def test_no_folder(tmp_path: Path) -> None:
    _refused(f"sqlite:///{tmp_path}/missing/a.db", NotWritableError, "does not exist; create it")
    (tmp_path / "file").write_text("")
    _refused(f"sqlite:///{tmp_path}/file/a.db", NotWritableError, "does not exist")


@pytest.mark.parametrize("what", ["folder", "file"])
def test_no_permission(what: str, tmp_path: Path, fork: Callable[..., Any]) -> None:
    path = tmp_path / "a.db"
    open_database(f"sqlite:///{path}").close()
    target = tmp_path if what == "folder" else path

    def run(say: Callable[[object], None]) -> None:
        if os.geteuid() == 0:  # root may do anything
            for folder in (tmp_path, *tmp_path.parents):
                if folder.stat().st_uid == 0 and folder != Path("/"):
                    folder.chmod(folder.stat().st_mode | 0o111)
            os.chown(tmp_path, 65534, 65534)
            for each in tmp_path.iterdir():
                os.chown(each, 65534, 65534)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        target.chmod(0o555 if what == "folder" else 0o444)
        with pytest.raises(NotWritableError) as caught:
            open_database(f"sqlite:///{path}")
        target.chmod(0o755)
        say(caught.value)

    child = fork(run)
    assert child.said.read().startswith(f"{target}: cannot be written; change its permissions")
    assert child.end() == 0


def test_locked_by_another_program(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with (
        open_database(f"sqlite:///{path}", busy_timeout_s=0.1) as database,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseBusyError, match="another program holds it"), database.write():
            pass
        other.execute("ROLLBACK")
        with database.write():
            pass


@pytest.mark.postgres
def test_no_server_or_no_database(postgres_url: str, tmp_path: Path) -> None:
    _refused(f"postgresql://postgres@/x?host={tmp_path}", ServerUnreachableError, str(tmp_path))
    _refused(postgres_url.replace("/scratch?", "/other?"), ServerUnreachableError, "does not exist")


@pytest.mark.postgres
def test_a_server_that_restarts_costs_one_connection(postgres_url: str) -> None:
    import psycopg

    with open_database(postgres_url) as database:
        repository = Repository(database)
        assert repository.studies() == []
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        assert repository.studies() == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("DiskFull", DiskFullError),
        ("ReadOnlySqlTransaction", NotWritableError),
        ("InsufficientPrivilege", NotWritableError),
        ("AdminShutdown", ServerUnreachableError),
        ("TooManyConnections", ServerUnreachableError),
        ("InvalidPassword", ServerUnreachableError),
        ("DeadlockDetected", DatabaseBusyError),
        ("UndefinedTable", NotADatabaseError),
    ],
)
def test_server_errors_by_their_state(name: str, kind: type[StoreError]) -> None:
    errors = pytest.importorskip("psycopg.errors")
    found = from_driver(getattr(errors, name)("first line\nDETAIL: second line"), "db")
    assert type(found) is kind
    assert str(found).startswith("db: ")
    assert "\n" not in str(found)


def test_spaces_percent_and_accents_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b%20#é?"
    folder.mkdir()
    monkeypatch.chdir(folder)
    open_database("sqlite:///ü 1.db").close()
    open_database("sqlite:///ü 1.db").close()
    assert (folder / "ü 1.db").stat().st_size > 0


def test_pragmas(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/a.db") as database, database.read_connection() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert found == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "busy_timeout": 30000}


def test_errors_of_the_callers_own_are_left_alone(tmp_path: Path) -> None:
    def fail(error: Exception) -> Callable[[], None]:
        raise error

    with open_database(f"sqlite:///{tmp_path}/a.db") as database:
        with pytest.raises(KeyError), database.translated():
            fail(KeyError("x"))
        with pytest.raises(OverflowError), database.lock("s"):
            fail(OverflowError("x"))
