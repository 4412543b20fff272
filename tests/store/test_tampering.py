"""Files that are moved, replaced or edited behind a run's back."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.cell import Cell
from autotune.domain.fingerprint import Facts
from autotune.store.database import Database, open_database
from autotune.store.errors import FileReplacedError, RoundsConflictError, StudyLockedError
from autotune.store.records import Study
from autotune.store.repository import Repository


def _write(database: Database) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM export")


def _delete(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def _move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


@pytest.mark.parametrize("name", ["a.db", "a.db-wal"])
@pytest.mark.parametrize("harm", [_delete, _replace, _move])
def test_a_file_that_is_no_longer_ours(harm: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/a.db") as database:
        _write(database)
        harm(tmp_path / name)
        files = sorted(tmp_path.iterdir())
        for use in (lambda: _write(database), lambda: Repository(database).studies()):
            with pytest.raises(FileReplacedError) as caught:
                use()
            text = str(caught.value)
            assert text.startswith(f"{tmp_path / name}: was {'replaced' if harm is _replace else 'deleted'}")
            assert "\n" not in text
        assert sorted(tmp_path.iterdir()) == files  # no empty database in its place


def test_it_is_noticed_within_a_write_and_nothing_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with open_database(f"sqlite:///{path}") as database:
        with pytest.raises(FileReplacedError), database.write() as connection:
            connection.exec_driver_sql("INSERT INTO software VALUES ('a', 'cpu', '{}', '2026-01-01')")
            path.rename(tmp_path / "b.db")
        (tmp_path / "b.db").rename(path)
        _write(database)  # put back, it is the same file
        with database.read_connection() as found:
            assert found.exec_driver_sql("SELECT count(*) FROM software").scalar() == 0


def test_other_users_of_the_file_are_no_alarm(tmp_path: Path, fork: Callable[..., Any]) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with open_database(url) as database:

        def use(say: Callable[[object], None]) -> None:
            for _ in range(3):
                with open_database(url) as mine:
                    _write(mine)
            with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as bare:
                bare.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            say("done")

        for _ in range(2):
            _write(database)
            child = fork(use)
            assert child.said.readline() == "done\n"
            assert child.end() == 0
            _write(database)


def test_looking_costs_microseconds(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/a.db") as database:
        _write(database)
        quickest = 1.0
        for _ in range(50):
            start = time.perf_counter()
            database.check_place()
            quickest = min(quickest, time.perf_counter() - start)
    assert quickest < 1e-4


@pytest.mark.parametrize("relative", [False, True])
def test_a_link_is_no_other_database(tmp_path: Path, relative: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link.db").symlink_to("../a.db" if relative else tmp_path / "a.db")
    with (
        open_database(f"sqlite:///{tmp_path}/a.db") as one,
        open_database(f"sqlite:///{folder}/link.db") as two,
        one.lock("x"),
        pytest.raises(StudyLockedError, match="study x"),
        two.lock("x"),
    ):
        pass
    assert not (folder / "link.db.lock").exists()


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("DELETE FROM round_chunk WHERE first_round = 0", "lacks rounds 0 to 3"),
        ("DELETE FROM round_chunk WHERE first_round = 4", "lacks rounds 4 to 7"),
        ("UPDATE round_chunk SET first_round = 3 WHERE first_round = 4", "other rounds than 3 to 6"),
        ("UPDATE round_chunk SET rounds = '[]' WHERE first_round = 4", "other rounds than 4 to 7"),
        (
            "UPDATE round_chunk SET rounds = (SELECT rounds FROM round_chunk WHERE first_round = 0)"
            " WHERE first_round = 8",
            "other rounds than 8 to 11",
        ),
    ],
)
def test_missing_and_exchanged_rounds_are_not_passed_over(
    statement: str,
    words: str,
    tmp_path: Path,
    facts: Facts,
    make_cell: Callable[..., Cell],
    make_study: Callable[..., Study],
) -> None:
    cell = make_cell()
    with open_database(f"sqlite:///{tmp_path}/a.db") as database:
        repository = Repository(database)
        study = make_study(repository, repository.register_fingerprint(facts))
        repository.add_cells(study, [(cell, [], 0)])
        for first in (0, 4, 8):
            rounds = [{"index": i} for i in range(first, first + 4)]
            repository.append_rounds(study, cell, first, rounds)
        assert [each["index"] for each in repository.rounds(study, cell)] == list(range(12))
        with database.write() as connection:
            connection.exec_driver_sql(statement)
        with pytest.raises(RoundsConflictError, match=words) as caught:
            repository.rounds(study, cell)
        assert "\n" not in str(caught.value)
