"""kill -9 and a full disk: what was committed stays, what was not is not half there."""

from __future__ import annotations

import contextlib
import resource
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.cell import Cell
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult, CheckStatus
from autotune.store.database import open_database
from autotune.store.errors import DiskFullError
from autotune.store.records import Study
from autotune.store.repository import Repository

CHUNK = 4


def _append_for_ever(url: str, say: Callable[[object], None]) -> None:
    """Append chunks whose values are a function of the round's index; say after each what is committed."""
    with open_database(url) as database:
        repository = Repository(database)
        study = repository.studies()[0]
        cell = repository.cells(study)[0].cell
        first = len(repository.rounds(study, cell))
        with database.lock(study.id):
            while True:
                rounds = [{"index": i, "run_us": {"a": i * 1.5}} for i in range(first, first + CHUNK)]
                first = repository.append_rounds(study, cell, first, rounds)
                say(first)


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_kill_9_while_appending(
    backend: str,
    tmp_path: Path,
    facts: Facts,
    make_cell: Callable[..., Cell],
    make_study: Callable[..., Study],
    fork: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    url = f"sqlite:///{tmp_path}/a.db" if backend == "sqlite" else request.getfixturevalue("postgres_url")
    cell = make_cell()
    with open_database(url) as database:
        repository = Repository(database)
        study = make_study(repository, repository.register_fingerprint(facts))
        repository.add_cells(study, [(cell, [], 0)])
    told = 0
    for attempt in range(3):
        child = fork(lambda say: _append_for_ever(url, say))
        for _ in range(10 + 7 * attempt):
            assert child.said.readline()
        time.sleep(0.004 * attempt)  # not always just after a commit
        assert child.end(kill=True) == -signal.SIGKILL
        rest = child.said.read().split()
        said = int(rest[-1]) if rest else told
        with open_database(url) as database:
            repository = Repository(database)
            rounds = repository.rounds(study, cell)
            assert [each["index"] for each in rounds] == list(range(len(rounds)))
            assert [each["run_us"]["a"] for each in rounds] == [1.5 * i for i in range(len(rounds))]
            assert len(rounds) % CHUNK == 0
            assert len(rounds) >= max(said, told + CHUNK * (10 + 7 * attempt))
            told = len(rounds)
    if backend == "sqlite":
        with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as bare:
            assert bare.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert bare.execute("SELECT count(*) FROM round_chunk").fetchone() == (told // CHUNK,)


def _fill_up(repository: Repository, study: Study, cell: Cell) -> int:
    """Append until the disk is full; the rounds that were reported as stored."""
    stored = 0
    with pytest.raises(DiskFullError) as caught:
        while stored < 100_000:
            stored = repository.append_rounds(
                study, cell, stored, [{"index": i, "pad": "x" * 200} for i in range(stored, stored + 40)]
            )
    assert "\n" not in str(caught.value)
    assert "run the same command again" in str(caught.value)
    return stored


def test_a_full_disk_loses_nothing(
    tmp_path: Path, facts: Facts, make_cell: Callable[..., Cell], make_study: Callable[..., Study]
) -> None:
    url, cell = f"sqlite:///{tmp_path}/a.db", make_cell()
    with open_database(url) as database:
        repository = Repository(database)
        fingerprint = repository.register_fingerprint(facts)
        study = make_study(repository, fingerprint)
        repository.add_cells(study, [(cell, [], 0)])
        with database.read_connection() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages + 30}")
        stored = _fill_up(repository, study, cell)
        assert stored > 0
        assert len(repository.rounds(study, cell)) == stored
        with database.read_connection() as connection:  # somebody frees some
            connection.exec_driver_sql("PRAGMA max_page_count=1000000")
        assert repository.append_rounds(study, cell, stored, [{"index": stored}]) == stored + 1
        repository.save_proof(fingerprint, cell.column, "a", 1, CheckResult("c", 1, CheckStatus.PASSED, 0))
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as bare:
        assert bare.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_writes_that_the_system_cuts_short(
    tmp_path: Path,
    facts: Facts,
    make_cell: Callable[..., Cell],
    make_study: Callable[..., Study],
    fork: Callable[..., Any],
) -> None:
    """A file-size limit, in a process of its own: the write itself fails, as on a full quota."""
    url, cell = f"sqlite:///{tmp_path}/a.db", make_cell()
    with open_database(url) as database:
        repository = Repository(database)
        study = make_study(repository, repository.register_fingerprint(facts))
        repository.add_cells(study, [(cell, [], 0)])

    def fill(say: Callable[[object], None]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        with open_database(url) as database:
            say(_fill_up(Repository(database), study, cell))

    child = fork(fill)
    said = child.said.read()
    assert child.end() == 0
    with open_database(url) as database:
        rounds = Repository(database).rounds(study, cell)
        assert 0 < len(rounds) == int(said)
        assert [each["index"] for each in rounds] == list(range(len(rounds)))


def test_a_full_disk_at_creation(tmp_path: Path, fork: Callable[..., Any]) -> None:
    url = f"sqlite:///{tmp_path}/a.db"

    def create(say: Callable[[object], None]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(DiskFullError) as caught:
            open_database(url)
        say(caught.value)

    child = fork(create)
    said = child.said.read()
    assert child.end() == 0
    assert said.startswith(f"{tmp_path}/a.db: ")
    assert said.count("\n") == 1
    with open_database(url) as database:  # with space, the same file is created after all
        assert Repository(database).studies() == []
