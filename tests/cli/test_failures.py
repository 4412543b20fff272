"""What goes wrong outside: exit 1 or 3, one line, nothing lost."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from autotune.store.database import open_database
from tests.console import SCRIPT, SINGLE, Place, Result, cli, limited_files, script


@pytest.mark.parametrize("gpu", ["b200", "h200", "gb300"])
def test_another_machine(gpu: str, place: Place) -> None:
    result = cli("run", "--gpu", gpu, "--db", place.url, "--out", place.out)
    assert result.code == 3
    assert result.out == ""
    assert f"--gpu {gpu}" in result.line
    assert f"NVIDIA {gpu.upper()}" in result.line
    assert "CPU: " in result.line
    for command in ("plan", "show", "export"):
        assert f"`{command}`" in result.line
    assert not place.file.exists()
    assert not place.out.exists()


def test_a_file_that_is_no_database(place: Place) -> None:
    place.file.write_bytes(b"not a database at all")
    result = cli("run", *place.flags())
    assert result.code == 1
    assert str(place.file) in result.line
    assert place.file.read_bytes() == b"not a database at all"


def test_a_folder_as_database(place: Place) -> None:
    place.file.mkdir()
    result = cli("run", *place.flags())
    assert result.code == 1
    assert "is a folder" in result.line


def test_a_database_in_no_folder(place: Place) -> None:
    result = cli(
        "run", *place.flags()[:-4], "--db", f"sqlite:///{place.folder}/no/such.db", "--out", place.out
    )
    assert result.code == 1
    assert "does not exist" in result.line


def test_a_foreign_database(place: Place) -> None:
    with contextlib.closing(sqlite3.connect(place.file)) as connection, connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    before = place.file.read_bytes()
    for command in ("run", "export"):
        result = cli(command, *place.flags())
        assert result.code == 1
        assert "'customers'" in result.line
    assert place.file.read_bytes() == before


def test_a_database_of_a_newer_version(done: Place) -> None:
    with contextlib.closing(sqlite3.connect(done.file)) as connection, connection:
        connection.execute("UPDATE autotune_alembic_version SET version_num = '9999'")
    for command in ("run", "export"):
        result = cli(command, *done.flags())
        assert result.code == 1
        assert "newer" in result.line
    assert done.count("decision") == 4


@pytest.mark.parametrize("command", ["run", "export"])
def test_an_output_folder_that_cannot_be_made(command: str, done: Place) -> None:
    (done.folder / "file").write_text("in the way")
    before = done.count("export")
    flags = [*done.flags()[:-1], str(done.folder / "file" / "tables")]
    result = cli(command, *flags)
    assert result.code == 1
    assert "--out" in result.line
    assert "file/tables" in result.line
    assert done.count("export") == before


def test_an_output_folder_is_tried_before_any_work(place: Place) -> None:
    place.out.write_text("in the way")
    result = cli("run", *place.flags())
    assert result.code == 1
    assert str(place.out) in result.line
    assert not place.file.exists()


def test_two_runs_at_once(done: Place) -> None:
    with open_database(done.url) as database, database.lock("somebody's"):
        result = cli("run", *done.flags())
        reading = cli("export", *done.flags())
    assert result.code == 1
    assert f"pid {os.getpid()}" in result.line
    assert "in use by another run" in result.line
    assert reading.code == 0  # it takes no lock
    assert cli("run", *done.flags()).code == 0


def test_a_full_disk_loses_nothing(tested: Place, finished: tuple[Place, Result]) -> None:
    with open_database(tested.url):
        pass
    # room for some commits: the limit holds for the write-ahead log too
    wal = tested.file.with_name(tested.file.name + "-wal")
    used = max(tested.file.stat().st_size, wal.stat().st_size if wal.exists() else 0)
    with limited_files(used + 150_000):
        result = cli("run", *tested.flags(SINGLE))
    assert result.code == 1, result.err
    assert result.err.splitlines()[-1].startswith(f"autotune: {tested.file}: ")
    assert "disk" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    kept = tested.verdicts()
    again = cli("run", *tested.flags(SINGLE), "--json")
    assert again.code == 0, again.err
    assert again.json["settled"] == 1
    assert set(kept) <= set(tested.verdicts())
    assert tested.completed() == [(0, 1)]
    assert tested.unended() == 0


def test_a_full_disk_under_the_table(done: Place) -> None:
    assert cli("export", *done.flags()).code == 0
    before = done.table.read_bytes()
    with contextlib.closing(sqlite3.connect(done.file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with limited_files(1000):
        result = cli("export", *done.flags())
    assert result.code == 1
    assert done.table.read_bytes() == before
    assert [path.name for path in done.out.iterdir()] == [done.table.name]


def test_a_run_needs_no_repository(finished: tuple[Place, Result]) -> None:
    """The shared run was made in a folder of its own, by the installed script."""
    assert finished[1].code == 0
    assert {path.name for path in finished[0].folder.iterdir()} <= {
        "evidence.db",
        "evidence.db-wal",
        "evidence.db-shm",
        "evidence.db.lock",
        "tables",
    }


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    with subprocess.Popen(
        [str(SCRIPT), "plan", "--gpu", "h200", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before the first byte
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_show_does_not_wait_for_torch(finished: tuple[Place, Result], tmp_path: Path) -> None:
    result = script("show", finished[0].table, folder=tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert result.code == 0
    for module in ("torch", "optuna", "sqlalchemy", "numpy"):
        assert f"| {module}\n" not in result.err
