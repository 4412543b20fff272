"""Schema history: equal to the models, upgraded after a backup, never downgraded."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from autotune.domain.cell import Cell
from autotune.domain.fingerprint import Facts
from autotune.store.database import Database, open_database
from autotune.store.errors import (
    DatabaseBusyError,
    DiskFullError,
    NewerSchemaError,
    NotWritableError,
    StoreError,
)
from autotune.store.migrations import revision_of, script_folder
from autotune.store.models import Base
from autotune.store.records import Study
from autotune.store.repository import Repository
from autotune.store.sqlite import OPTUNA_TABLES, VERSION_TABLE

STEP = '''"""A step of a later version: one table more, one column more in a table that others refer to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table("later", sa.Column("id", sa.Integer(), primary_key=True))
    copied = "always" if op.get_bind().dialect.name == "sqlite" else "auto"
    with op.batch_alter_table("study", recreate=copied) as batch:
        batch.add_column(sa.Column("note", sa.String(), nullable=False, server_default="from before"))
    {extra}


def downgrade() -> None:
    op.drop_table("later")
'''


@pytest.fixture
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Migrations of a later version of this package."""
    return _later(tmp_path_factory.mktemp("later"), "")


def _later(folder: Path, extra: str) -> Path:
    copy = folder / "db"
    shutil.copytree(script_folder(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "versions" / "0004_later.py").write_text(STEP.replace("{extra}", extra))
    return copy


def _fill(
    database: Database, facts: Facts, cell: Cell, make_study: Callable[..., Study]
) -> tuple[Repository, Study]:
    repository = Repository(database)
    study = make_study(repository, repository.register_fingerprint(facts))
    repository.add_cells(study, [(cell, ["m"], 0)])
    repository.append_rounds(study, cell, 0, [{"run_us": 1.5}])
    return repository, study


def test_the_models_are_the_migrated_schema(database: Database) -> None:
    with database.read_connection() as connection:
        options = {"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
        assert set(inspect(connection).get_table_names()) == {*Base.metadata.tables, VERSION_TABLE}


def test_no_name_is_one_of_optunas() -> None:
    from optuna.storages._rdb.models import BaseModel

    assert {*BaseModel.metadata.tables, "alembic_version"} == OPTUNA_TABLES
    assert not OPTUNA_TABLES & {*Base.metadata.tables, VERSION_TABLE}


def test_names_fit_into_postgresqls_63_bytes() -> None:
    for table in Base.metadata.tables.values():
        names = [str(each.name) for each in table.constraints] + [str(each.name) for each in table.indexes]
        assert max(len(name) for name in names) <= 63


def test_an_older_file_is_copied_then_upgraded(
    tmp_path: Path,
    later: Path,
    facts: Facts,
    make_cell: Callable[..., Cell],
    make_study: Callable[..., Study],
) -> None:
    path, cell = tmp_path / "a.db", make_cell()
    database = open_database(f"sqlite:///{path}")
    _, study = _fill(database, facts, cell, make_study)
    # not closed: what only the write-ahead log holds must be in the backup
    with (
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as bare,
        pytest.raises(sqlite3.OperationalError),
    ):
        bare.execute("SELECT count(*) FROM cell").fetchone()
    with open_database(f"sqlite:///{path}", migrations=later) as upgraded:
        repository = Repository(upgraded)
        assert repository.study(study.id) == replace(study, resumed=True)
        assert repository.rounds(study, cell) == [{"run_us": 1.5}]
        with upgraded.read_connection() as connection:
            assert connection.exec_driver_sql("SELECT note FROM study").scalar() == "from before"
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
            assert revision_of(connection) == "0004"
    database.close()
    copies = sorted(tmp_path.glob("a.db.backup*"))
    assert [each.name for each in copies] == ["a.db.backup-0003"]
    shutil.copy(copies[0], tmp_path / "restored.db")
    with open_database(f"sqlite:///{tmp_path}/restored.db") as restored:
        assert Repository(restored).rounds(study, cell) == [{"run_us": 1.5}]


def test_a_current_file_is_not_copied(tmp_path: Path) -> None:
    for _ in range(2):
        open_database(f"sqlite:///{tmp_path}/a.db").close()
    assert list(tmp_path.glob("*backup*")) == []


def test_a_backup_is_never_overwritten(tmp_path: Path, later: Path) -> None:
    open_database(f"sqlite:///{tmp_path}/a.db").close()
    (tmp_path / "a.db.backup-0003").write_text("precious")
    open_database(f"sqlite:///{tmp_path}/a.db", migrations=later).close()
    assert (tmp_path / "a.db.backup-0003").read_text() == "precious"
    assert (tmp_path / "a.db.backup-0003.2").read_bytes().startswith(b"SQLite format 3")


def test_no_backup_no_upgrade(tmp_path: Path, later: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    open_database(f"sqlite:///{path}").close()

    def full(source: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DiskFullError, match=r"backup-0003 \(backup before a schema change\)"):
        open_database(f"sqlite:///{path}", migrations=later)
    monkeypatch.undo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.db", "a.db.lock"]
    with open_database(f"sqlite:///{path}") as database, database.read_connection() as connection:
        assert revision_of(connection) == "0003"


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_a_step_that_fails_leaves_the_old_schema(
    backend: str,
    tmp_path: Path,
    facts: Facts,
    make_cell: Callable[..., Cell],
    make_study: Callable[..., Study],
    request: pytest.FixtureRequest,
) -> None:
    url = f"sqlite:///{tmp_path}/a.db" if backend == "sqlite" else request.getfixturevalue("postgres_url")
    cell = make_cell()
    with open_database(url) as database:
        _, study = _fill(database, facts, cell, make_study)
    broken = _later(tmp_path, 'op.execute("INSERT INTO nowhere VALUES (1)")')
    with pytest.raises(StoreError, match="nowhere"):
        open_database(url, migrations=broken)
    with open_database(url) as database, database.read_connection() as connection:
        assert revision_of(connection) == "0003"
        assert "later" not in inspect(connection).get_table_names()
        assert Repository(database).rounds(study, cell) == [{"run_us": 1.5}]


@pytest.fixture
def reader_url(postgres_url: str) -> Iterator[str]:
    """The same database for a role that may look at every table and change nothing."""
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA public TO reader")
        connection.execute("ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO reader")
    yield postgres_url.replace("postgres@", "reader@")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY reader")
        connection.execute("DROP ROLE reader")


@pytest.mark.postgres
def test_a_reader_of_an_older_schema_is_told_who_can_upgrade_it(
    postgres_url: str, reader_url: str, later: Path
) -> None:
    with pytest.raises(NotWritableError) as empty:
        open_database(reader_url)
    assert str(empty.value).startswith("postgresql+psycopg://reader@/scratch")
    assert str(empty.value).endswith(
        ": has no tables yet and this role may not make them; use a role that may create tables"
    )
    open_database(postgres_url).close()
    open_database(reader_url).close()  # a current one can be read
    with pytest.raises(NotWritableError) as old:
        open_database(reader_url, migrations=later)
    line = str(old.value)
    assert "\n" not in line and "permission" not in line and "SQL" not in line.partition(": has ")[2]
    assert line.endswith(
        ": has schema 0003, this version needs 0004, and this role may not upgrade it; open it once "
        "with this version as the role that owns its tables (autotune doctor --db URL does)"
    )
    open_database(reader_url).close()  # nothing was changed
    open_database(postgres_url, migrations=later).close()
    open_database(reader_url, migrations=later).close()


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_a_newer_schema_is_refused(
    backend: str,
    tmp_path: Path,
    later: Path,
    facts: Facts,
    make_cell: Callable[..., Cell],
    make_study: Callable[..., Study],
    request: pytest.FixtureRequest,
) -> None:
    url = f"sqlite:///{tmp_path}/a.db" if backend == "sqlite" else request.getfixturevalue("postgres_url")
    cell = make_cell()
    with open_database(url) as database:
        _, study = _fill(database, facts, cell, make_study)
    with open_database(url, migrations=later) as database:
        assert Repository(database).rounds(study, cell) == [{"run_us": 1.5}]
    with pytest.raises(
        NewerSchemaError, match=r"newer version \(schema 0004, this one knows up to 0003\)"
    ) as caught:
        open_database(url)
    assert "\n" not in str(caught.value)
    with open_database(url, migrations=later) as database:
        assert Repository(database).rounds(study, cell) == [{"run_us": 1.5}]


def test_no_upgrade_under_a_running_study(tmp_path: Path, later: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with open_database(url) as database, database.lock("3f9c"):
        with pytest.raises(DatabaseBusyError, match=r"study 3f9c.*must be upgraded"):
            open_database(url, migrations=later, busy_timeout_s=0.1)
        with open_database(url):  # reading beside a run needs no lock
            pass


def _open(url: str, barrier: Any, results: Any) -> None:
    barrier.wait()
    try:
        open_database(url).close()
        results.put("")
    except StoreError as error:
        results.put(str(error))


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_two_processes_create_one_database(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/a.db" if backend == "sqlite" else request.getfixturevalue("postgres_url")
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.SimpleQueue()
    processes = [context.Process(target=_open, args=(url, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    assert found == ["", "", ""]
    assert list(tmp_path.glob("*backup*")) == []


def test_an_installed_copy_takes_the_packages_own_migrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.store import migrations

    package = tmp_path / "site-packages" / "autotune"
    shutil.copytree(script_folder(), package / "_data" / "db")
    shutil.copytree(script_folder(), tmp_path / "site-packages" / "db")  # of some other distribution
    monkeypatch.setattr(migrations, "__file__", str(package / "store" / "migrations.py"))
    assert migrations.script_folder() == package / "_data" / "db"
    open_database(f"sqlite:///{tmp_path}/a.db").close()
    shutil.rmtree(package / "_data")
    with pytest.raises(StoreError, match="install it again"):
        open_database(f"sqlite:///{tmp_path}/b.db")
