"""A copy of a database file: whole, whether or not it is in use, and nothing left beside the original."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from autotune.store.snapshot import snapshot


def songs(path: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT title FROM songs").fetchall()


@pytest.mark.parametrize("in_use", [False, True])
def test_it_has_what_is_committed_and_leaves_nothing_beside(in_use: bool, tmp_path: Path) -> None:
    path, copy = tmp_path / "kept" / "a.db", tmp_path / "copy.db"
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    with connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
        connection.execute("INSERT INTO songs VALUES ('one')")
    if not in_use:
        connection.close()
    before = {each.name for each in path.parent.iterdir()}
    assert ("a.db-wal" in before) == in_use
    snapshot(path, copy)
    assert {each.name for each in path.parent.iterdir()} == before
    assert songs(copy) == [("one",)]
    connection.close()


def test_what_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("hello, this is a text")
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        snapshot(tmp_path / "a.db", tmp_path / "copy.db")
