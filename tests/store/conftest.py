"""Databases to test against: SQLite in a file and in memory, and a PostgreSQL server of our own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.store.database import Database, open_database
from autotune.store.models import Base
from autotune.store.records import Fingerprint, Study
from autotune.store.repository import Repository


def _postgres_tool(name: str) -> str | None:
    found = shutil.which(name)
    if found is None:
        hits = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
        found = str(hits[-1]) if hits else None
    return found


def _unprivileged() -> dict[str, Any]:
    """``subprocess`` arguments that run PostgreSQL as somebody else: it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    pytest.skip("running as root, and there is neither a user 'postgres' nor 'nobody' to run the server as")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a running server, without a database name: a Unix socket in a folder of its own, no port."""
    initdb, postgres = _postgres_tool("initdb"), _postgres_tool("postgres")
    if initdb is None or postgres is None:
        pytest.skip("initdb is not installed")
    psycopg = pytest.importorskip("psycopg")
    who = _unprivileged()
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # a socket's path must stay under 108 bytes
    try:
        if who:
            os.chown(folder, who["user"], who["group"])
        data = folder / "data"
        subprocess.run(
            [initdb, "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=folder,
            **who,
        )
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(folder),
            "fsync": "off",
            "synchronous_commit": "off",
            "full_page_writes": "off",
            "shared_buffers": "16MB",
            "max_connections": "20",
        }
        flags = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [postgres, "-D", data, *flags],
                stdout=log,
                stderr=log,
                cwd=folder,
                preexec_fn=_die_with_parent,
                **who,
            )
        try:
            deadline = time.monotonic() + 30
            while True:
                try:
                    psycopg.connect(host=str(folder), user="postgres", dbname="postgres").close()
                    break
                except psycopg.OperationalError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise AssertionError((folder / "log").read_text()) from None
                    time.sleep(0.05)
            yield f"postgresql://postgres@/{{name}}?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def _scratch(postgres_server: str) -> str:
    import psycopg

    with psycopg.connect(postgres_server.format(name="postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE scratch")
    return postgres_server.format(name="scratch")


@pytest.fixture
def postgres_url(_scratch: str) -> str:
    """URL of an empty PostgreSQL database that nobody is connected to."""
    import psycopg

    with psycopg.connect(_scratch, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return _scratch


class Forked:
    """A child that runs a function of the test: everything is imported already."""

    def __init__(self, function: Callable[[Callable[[object], None]], None]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:  # pragma: no cover - another process
            code = 1
            try:
                os.close(reading)
                function(lambda line: _write(writing, line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        self.said = os.fdopen(reading)
        self._status: int | None = None

    def end(self, kill: bool = False) -> int:
        """Wait, after SIGKILL if wanted; the exit code, negative for a signal."""
        if self._status is None:
            if kill:
                os.kill(self.pid, signal.SIGKILL)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


def _write(handle: int, line: object) -> None:
    os.write(handle, f"{line}\n".encode())


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[Callable[[object], None]], None]], Forked]]:
    """``fork(function)`` runs ``function(say)`` in a child; ``child.said`` has what it says, a line each."""
    children: list[Forked] = []

    def start(function: Callable[[Callable[[object], None]], None]) -> Forked:
        children.append(Forked(function))
        return children[-1]

    yield start
    for child in children:
        child.end(kill=True)
        child.said.close()


BACKENDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(scope="session")
def postgres_database(postgres_server: str) -> Iterator[Database]:
    """Opened once: a database of its own for every test takes 0.3 s."""
    import psycopg

    with psycopg.connect(postgres_server.format(name="postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE shared")
    with open_database(postgres_server.format(name="shared")) as database:
        yield database


@pytest.fixture(scope="session")
def sqlite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the schema and no rows, to be copied."""
    path = tmp_path_factory.mktemp("template") / "autotune.db"
    open_database(f"sqlite:///{path}").close()
    return path


@pytest.fixture(params=BACKENDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An open, empty database, for each backend."""
    if request.param == "postgres":
        shared: Database = request.getfixturevalue("postgres_database")
        with shared.write() as connection:
            connection.exec_driver_sql(f"TRUNCATE {', '.join(Base.metadata.tables)}")
        yield shared
        return
    path = tmp_path / "autotune.db"
    shutil.copy(request.getfixturevalue("sqlite_file"), path)
    with open_database(f"sqlite:///{path}") as found:
        yield found


@pytest.fixture
def repository(database: Database) -> Repository:
    """On an empty database, for each backend."""
    return Repository(database)


@pytest.fixture
def facts() -> Facts:
    """Facts of every scalar type; 1e22 and 700.0 tell a store that changes types."""
    return Facts(
        "cpu",
        {"name": "Test CPU", "cores": 2, "threads": 1, "isa": "avx512", "limit": 700.0, "huge": 1e22},
        {"torch": "2.13.0", "torch_commit": None},
        {"container": True},
    )


@pytest.fixture
def fingerprint(repository: Repository, facts: Facts) -> Fingerprint:
    """Registered."""
    return repository.register_fingerprint(facts)


@pytest.fixture
def make_study() -> Callable[..., Study]:
    """``make_study(repository, fingerprint, **changes)`` opens a study."""

    def make(repository: Repository, fingerprint: Fingerprint, **changes: Any) -> Study:
        fields: dict[str, Any] = {
            "space_name": "cpu",
            "space_digest": "d1",
            "engine": "generic",
            "objectives": ("graph",),
            "margin": 0.05,
            "multiplicity": 80,
            "unit": "round",
            "seed": 2**62 + 1,
            "code_version": "c1",
        }
        return repository.open_study(fingerprint, **{**fields, **changes})

    return make


@pytest.fixture
def study(repository: Repository, fingerprint: Fingerprint, make_study: Callable[..., Study]) -> Study:
    """Open, without cells."""
    return make_study(repository, fingerprint)


@pytest.fixture
def make_cell() -> Callable[..., Cell]:
    """``make_cell(batch_size, kv_high, interval=None)``."""

    def make(batch_size: int = 4, kv_high: int = 1024, interval: tuple[int, int] | None = None) -> Cell:
        column = Column(
            Shape(8, 1, 128, 16, window_left=127, sinks=True, soft_cap=30.0),
            DTypes("bf16", "e4m3", "bf16"),
            q_len=4,
            batch_size=batch_size,
            max_context=4096,
            interval=interval,
        )
        return Cell(column, 4, kv_high)

    return make


@pytest.fixture
def cell(repository: Repository, study: Study, make_cell: Callable[..., Cell]) -> Cell:
    """In the study's queue."""
    found = make_cell()
    repository.add_cells(study, [(found, ["m @ attn_tp 1"], 0)])
    return found
