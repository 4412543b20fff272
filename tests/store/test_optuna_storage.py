"""Optuna beside us in one database."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import inspect, text

from autotune.domain.cell import Cell
from autotune.domain.fingerprint import Facts
from autotune.store.database import Database, open_database
from autotune.store.errors import DatabaseBusyError, NewerSchemaError
from autotune.store.models import Base
from autotune.store.optuna_storage import rdb_storage
from autotune.store.records import Study
from autotune.store.repository import Repository
from autotune.store.sqlite import OPTUNA_TABLES, VERSION_TABLE

BACKENDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


def _url(backend: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if backend == "sqlite":
        return f"sqlite:///{tmp_path}/a.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


def _optuna_study(database: Database, name: str) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with database.translated():
        return optuna.create_study(storage=rdb_storage(database), study_name=name, load_if_exists=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_database(
    backend: str,
    tmp_path: Path,
    facts: Facts,
    make_cell: Callable[..., Cell],
    make_study: Callable[..., Study],
    request: pytest.FixtureRequest,
) -> None:
    import optuna

    url = _url(backend, tmp_path, request)
    cells = [make_cell(batch) for batch in (1, 2, 4)]
    for number in range(3):  # three runs, each resumes
        with open_database(url) as database:
            repository = Repository(database)
            study = make_study(repository, repository.register_fingerprint(facts))
            repository.add_cells(study, [(each, [], rank) for rank, each in enumerate(cells)])
            search = _optuna_study(database, study.optuna_name)
            search.enqueue_trial({"cell": number})
            trial = search.ask({"cell": optuna.distributions.IntDistribution(0, 2)})
            assert trial.params == {"cell": number}
            begun = repository.begin_trial(study, cells[number], trial.number, trial._trial_id)
            repository.append_rounds(study, cells[number], 0, [{"index": 0}])
            search.tell(trial, 1.0)
            assert (begun.optuna_number, len(repository.trials(study))) == (number, number + 1)
            assert [each.number for each in search.trials] == list(range(number + 1))
            with database.read_connection() as connection:
                names = set(inspect(connection).get_table_names())
            assert names == {*Base.metadata.tables, VERSION_TABLE, *OPTUNA_TABLES}


def test_optuna_first(tmp_path: Path) -> None:
    import optuna

    url = f"sqlite:///{tmp_path}/a.db"
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    optuna.create_study(storage=url, study_name="theirs")
    with open_database(url) as database:
        assert Repository(database).studies() == []
        assert _optuna_study(database, "theirs").trials == []


def test_optunas_connections_are_tuned_and_nobody_elses(tmp_path: Path) -> None:
    from sqlalchemy import create_engine

    with open_database(f"sqlite:///{tmp_path}/a.db") as database:
        engine = rdb_storage(database).engine
        with engine.connect() as connection:
            assert connection.execute(text("PRAGMA synchronous")).scalar() == 1
            assert connection.execute(text("PRAGMA busy_timeout")).scalar() == 30000
        with create_engine(f"sqlite:///{tmp_path}/other.db").connect() as connection:
            assert connection.execute(text("PRAGMA journal_mode")).scalar() == "delete"


def test_an_optuna_call_inside_our_transaction_is_one_clear_line(tmp_path: Path) -> None:
    """Documented as forbidden; if it happens it must not look like a crash of Optuna."""
    with open_database(f"sqlite:///{tmp_path}/a.db", busy_timeout_s=0.1) as database:
        search = _optuna_study(database, "s")
        with pytest.raises(DatabaseBusyError) as caught, database.write():
            search.set_user_attr("a", 1)
        assert "\n" not in str(caught.value)
        search.set_user_attr("a", 1)


def test_another_optunas_tables(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path}/a.db") as database:
        _optuna_study(database, "s")
        with database.write() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = 'v99.0.0'"))
        with pytest.raises(NewerSchemaError, match="optuna") as caught:
            rdb_storage(database)
        assert "\n" not in str(caught.value)


def test_in_memory(tmp_path: Path) -> None:
    with open_database("sqlite://") as database:
        assert _optuna_study(database, "s").trials == []


def test_the_repository_does_not_import_optuna() -> None:
    code = (
        "import sys, autotune.store.repository, autotune.store.optuna_storage\n"
        "sys.exit('optuna' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_stays_open_beside_the_file(tmp_path: Path) -> None:
    """A log that is left until some connection is collected changes the file when nobody expects it."""
    from optuna.distributions import IntDistribution

    gc.disable()
    try:
        with open_database(f"sqlite:///{tmp_path}/closed.db") as database:
            study = _optuna_study(database, "closed")
            study.tell(study.ask({"cell": IntDistribution(0, 9)}), 1.0)
        assert [path.name for path in tmp_path.iterdir() if "-" in path.name] == []
    finally:
        gc.enable()
    assert len(study.trials) == 1  # it opens again where it is asked
