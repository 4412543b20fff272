"""Rounds of second processes: append only, gapless, and readable in databases of before they existed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import inspect, update

from autotune.domain.cell import Cell
from autotune.domain.fingerprint import Facts
from autotune.store.database import Database, open_database
from autotune.store.errors import RoundsConflictError
from autotune.store.migrations import revision_of, script_folder
from autotune.store.models import RecheckRow
from autotune.store.records import Study
from autotune.store.repository import Repository


def rounds(first: int, count: int) -> list[dict[str, Any]]:
    return [{"index": i, "run_us": {"a": 1.5}} for i in range(first, first + count)]


def test_processes_of_a_cell_in_order(repository: Repository, study: Study, cell: Cell) -> None:
    assert repository.rechecks(study) == {}
    repository.append_recheck(study, cell, 1, 0, rounds(0, 4), sampled=True)
    repository.append_recheck(study, cell, 1, 4, rounds(4, 2), sampled=True)
    repository.append_recheck(study, cell, 2, 0, rounds(0, 3), sampled=False)
    first, second = repository.rechecks(study)[cell.id]
    assert (first.process, first.sampled, list(first.rounds)) == (1, True, rounds(0, 6))
    assert (second.process, second.sampled, list(second.rounds)) == (2, False, rounds(0, 3))
    # the cell's own rounds are another matter
    assert repository.rounds(study, cell) == []


@pytest.mark.parametrize(
    ("process", "first", "sampled"),
    [(1, 0, True), (1, 3, True), (1, 4, False), (2, 1, False), (3, 0, False)],
)
def test_what_does_not_continue_is_refused(
    process: int, first: int, sampled: bool, repository: Repository, study: Study, cell: Cell
) -> None:
    repository.append_recheck(study, cell, 1, 0, rounds(0, 4), sampled=True)
    with pytest.raises(RoundsConflictError, match="process 1, for 4 rounds"):
        repository.append_recheck(study, cell, process, first, rounds(first, 2), sampled=sampled)
    assert len(repository.rechecks(study)[cell.id][0].rounds) == 4


def test_an_earlier_process_is_never_continued(repository: Repository, study: Study, cell: Cell) -> None:
    repository.append_recheck(study, cell, 1, 0, rounds(0, 4), sampled=True)
    repository.append_recheck(study, cell, 2, 0, rounds(0, 4), sampled=True)
    with pytest.raises(RoundsConflictError):
        repository.append_recheck(study, cell, 1, 4, rounds(4, 4), sampled=True)


@pytest.mark.parametrize(("process", "first", "count"), [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_senseless_chunks(
    process: int, first: int, count: int, repository: Repository, study: Study, cell: Cell
) -> None:
    with pytest.raises(ValueError, match="nothing to append"):
        repository.append_recheck(study, cell, process, first, rounds(0, count), sampled=False)
    with pytest.raises(ValueError, match="JSON"):
        repository.append_recheck(study, cell, 1, 0, [{"run_us": float("nan")}], sampled=False)
    assert repository.rechecks(study) == {}


@pytest.mark.parametrize("change", [{"first_round": 1}, {"size": 3}, {"process": 2}])
def test_rows_that_were_tampered_with_are_refused(
    change: dict[str, int], database: Database, repository: Repository, study: Study, cell: Cell
) -> None:
    repository.append_recheck(study, cell, 1, 0, rounds(0, 4), sampled=True)
    with database.write() as connection:
        connection.execute(update(RecheckRow).values(change))
    with pytest.raises(RoundsConflictError, match="restore the database"):
        repository.rechecks(study)


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_a_database_from_before_is_upgraded_and_keeps_its_rounds(
    backend: str,
    tmp_path: Path,
    facts: Facts,
    make_cell: Callable[..., Cell],
    make_study: Callable[..., Study],
    request: pytest.FixtureRequest,
) -> None:
    url = f"sqlite:///{tmp_path}/a.db" if backend == "sqlite" else request.getfixturevalue("postgres_url")
    older = tmp_path / "db"
    shutil.copytree(script_folder(), older, ignore=shutil.ignore_patterns("__pycache__"))
    for step in (older / "versions").glob("000[3-9]*.py"):
        step.unlink()
    cell = make_cell()
    with open_database(url, migrations=older) as database, database.read_connection() as connection:
        assert revision_of(connection) == "0002"
        assert "recheck" not in inspect(connection).get_table_names()
        connection.rollback()
        repository = Repository(database)
        study = make_study(repository, repository.register_fingerprint(facts))
        repository.add_cells(study, [(cell, ["m"], 0)])
        repository.append_rounds(study, cell, 0, rounds(0, 4))
    with open_database(url) as database:
        repository = Repository(database)
        assert repository.rounds(study, cell) == rounds(0, 4)
        assert repository.rechecks(study) == {}
        repository.append_recheck(study, cell, 1, 0, rounds(0, 4), sampled=True)
    with open_database(url) as database:
        assert len(Repository(database).rechecks(study)[cell.id]) == 1
