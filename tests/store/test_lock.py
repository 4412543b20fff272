"""One run at a time, and a lock that dies with its holder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from autotune.store.database import Database, open_database
from autotune.store.errors import NotWritableError, StudyLockedError


def _hold(url: str, study: str, say: Callable[[object], None]) -> None:
    with open_database(url) as database, database.lock(study):
        say("held")
        time.sleep(60)


def _url(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if backend == "sqlite":
        return f"sqlite:///{tmp_path}/a.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


SHARED = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.mark.parametrize("backend", SHARED)
def test_another_process(
    backend: str, tmp_path: Path, fork: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    url = _url(backend, tmp_path, request)
    holder = fork(lambda say: _hold(url, "3f9c", say))
    assert holder.said.readline() == "held\n"
    with open_database(url) as database:
        with pytest.raises(StudyLockedError) as caught, database.lock("3f9c"):
            pass
        text = str(caught.value)
        assert re.search(rf"in use by another run \(pid {holder.pid} on .*since 20\d\d-", text)
        assert "\n" not in text
        assert holder.end(kill=True) == -signal.SIGKILL
        _lock_within(database, "3f9c", 5.0)  # a server notices a dead client in a moment


def _lock_within(database: Database, study: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with database.lock(study):
                return
        except StudyLockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def test_released_and_taken_again_in_one_process(database: Database) -> None:
    # often: a lock that ended with its connection was now and then still held
    for _ in range(25):
        with database.lock("3f9c"), pytest.raises(StudyLockedError), database.lock("3f9c"):
            pass
    with pytest.raises(RuntimeError, match="inside"), database.lock("3f9c"):
        raise RuntimeError("inside")
    with database.lock("3f9c"):
        pass


def test_in_memory() -> None:
    with open_database("sqlite://") as database:
        for _ in range(2):
            with database.lock("3f9c"), pytest.raises(StudyLockedError), database.lock("3f9c"):
                pass


def test_a_refused_run_leaves_the_holders_name(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/a.db") as database, database.lock("3f9c"):
        for _ in range(2):
            with pytest.raises(StudyLockedError, match=r"\(pid \d+ on "), database.lock("3f9c"):
                pass


@pytest.mark.postgres
def test_released_by_word_and_not_by_the_end_of_the_connection(postgres_url: str) -> None:
    said = []
    with open_database(postgres_url) as database:
        event.listen(database.engine, "before_cursor_execute", lambda *call: said.append(call[2]))
        with database.lock("3f9c"):
            assert not any("pg_advisory_unlock" in statement for statement in said)
        assert sum("pg_advisory_unlock" in statement for statement in said) == 1


@pytest.mark.postgres
def test_a_server_that_ends_the_holder_hides_no_error_of_the_run(postgres_url: str) -> None:
    with open_database(postgres_url) as database:
        with pytest.raises(RuntimeError, match="inside"), database.lock("3f9c"):
            with database.write() as connection:
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
                )
            raise RuntimeError("inside")
        _lock_within(database, "3f9c", 5.0)


@pytest.mark.postgres
def test_studies_on_one_server_do_not_exclude_each_other(postgres_url: str) -> None:
    with open_database(postgres_url) as database, database.lock("3f9c"), database.lock("aaaa"):
        pass


def test_studies_in_one_file_do(tmp_path: Path) -> None:
    with (
        open_database(f"sqlite:///{tmp_path}/a.db") as database,
        database.lock("3f9c"),
        pytest.raises(StudyLockedError, match="study 3f9c"),
        database.lock("aaaa"),
    ):
        pass


def test_reading_and_writing_go_on_beside_a_lock(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with (
        open_database(url) as database,
        database.lock("3f9c"),
        open_database(url) as other,
        other.write() as connection,
    ):
        connection.exec_driver_sql("INSERT INTO software VALUES ('a', 'cpu', '{}', '2026-01-01')")


def test_a_lock_file_of_unknown_content(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with open_database(url) as database, database.lock("3f9c"):
        (tmp_path / "a.db.lock").write_bytes(b"\xff\x00 not json")
        with pytest.raises(StudyLockedError, match="holder unknown"), database.lock("3f9c"):
            pass


def test_a_lock_file_that_cannot_be_made(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/a.db") as database:
        (tmp_path / "a.db.lock").unlink()
        (tmp_path / "a.db.lock").mkdir()
        with pytest.raises(NotWritableError, match=r"a\.db\.lock: Is a directory"), database.lock("3f9c"):
            pass


def test_a_child_started_by_exec_does_not_keep_it(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/a.db") as database:
        with database.lock("3f9c"):
            child = subprocess.Popen(["sleep", "60"], close_fds=False)
        try:
            with database.lock("3f9c"):
                assert os.path.exists(f"/proc/{child.pid}")  # noqa: PTH110 - a process, not a file
        finally:
            child.kill()
            child.wait()
