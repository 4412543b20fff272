"""The command line under test: in this process, or the console script in a session of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.cli.main import main
from autotune.domain.cell import Column
from autotune.hardware.collect import collect
from autotune.store.database import open_database
from autotune.store.repository import Repository
from autotune.tuner.code_version import code_version

SCRIPT = Path(sys.executable).with_name("autotune")
SPACES = Path(__file__).parent / "data" / "spaces"
TINY = SPACES / "tiny.yaml"
SIX = SPACES / "six.yaml"
SINGLE = SPACES / "single.yaml"
MARK = "AUTOTUNE_TEST_MARK"


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as one JSON document."""
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """stderr, which must be one line and no traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("autotune: ")
        return lines[0]


def cli(*arguments: object) -> Result:
    """Run a command in this process: no interpreter to start, no torch to import."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        else:
            raise AssertionError("main() returned")
    return Result(code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Place:
    """A folder with a database and an output folder of its own."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "evidence.db"

    @property
    def url(self) -> str:
        return f"sqlite:///{self.file}"

    @property
    def out(self) -> Path:
        return self.folder / "tables"

    @property
    def table(self) -> Path:
        return self.out / "cpu.generic.yaml"

    def flags(self, space: Path = TINY) -> list[str]:
        """What ``run`` and ``export`` take."""
        return ["--space", str(space), "--db", self.url, "--out", str(self.out)]

    def copy_of(self, other: Place) -> Place:
        """Take over another place's database."""
        with (
            contextlib.closing(sqlite3.connect(other.file)) as source,
            contextlib.closing(sqlite3.connect(self.file)) as target,
        ):
            source.backup(target)
        return self

    def with_selftest_of(self, other: Place) -> Place:
        """Take over another place's stored self-test, so that a run need not repeat it."""
        with open_database(other.url) as theirs, open_database(self.url) as ours:
            repository = Repository(ours)
            fingerprint = repository.register_fingerprint(collect("cpu", threads=1))
            stored = Repository(theirs).selftest(fingerprint, code_version())
            if stored is not None:  # None: the code was edited in between; the run does it again
                repository.save_selftest(
                    fingerprint, code_version(), passed=stored.passed, results=stored.results
                )
        return self

    def count(self, table: str, condition: str = "1") -> int:
        """Rows of a table that meet ``condition``; 0 while there is no such table."""
        rows = self.rows(f"SELECT count(*) FROM {table} WHERE {condition}")
        return int(rows[0][0]) if rows else 0

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query gives; [] while it cannot be asked."""
        if not self.file.exists():
            return []
        with contextlib.closing(sqlite3.connect(self.file, timeout=5)) as connection:
            try:
                return connection.execute(query).fetchall()
            except sqlite3.OperationalError:
                return []

    def completed(self) -> list[tuple[Any, ...]]:
        """Optuna's complete trials a cell: ``(cell number, trials)``."""
        return self.rows(
            "SELECT CAST(p.param_value AS INTEGER), count(*) FROM trials t"
            " JOIN trial_params p USING (trial_id) WHERE t.state = 'COMPLETE' GROUP BY 1 ORDER BY 1"
        )

    def unended(self) -> int:
        """Optuna's trials that nobody ended."""
        return self.count("trials", "state IN ('RUNNING', 'WAITING')")

    def verdicts(self) -> list[tuple[Any, ...]]:
        """Every proof row, as far as it must not depend on how often the run was interrupted."""
        return self.rows(
            "SELECT column_id, cell_id, route, route_version, check_name, check_version, status, kind, seed,"
            " launches FROM proof ORDER BY column_id, cell_id, route, check_name"
        )


@dataclass
class Script:
    """The console script, running in a session of its own; its descendants carry a mark."""

    arguments: list[str]
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [str(SCRIPT), *self.arguments],
            cwd=self.folder,
            env={**os.environ, **self.env, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=self.prepare,
        )

    def until(self, seen: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Wait until ``seen()``; an error if the script ends first."""
        end = time.monotonic() + timeout_s
        while not seen():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "it never came to that"
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Signal the parent alone."""
        self.process.send_signal(number)

    def end(self, timeout_s: float = 90.0) -> Result:
        """Wait for the end."""
        out, err = self.process.communicate(timeout=timeout_s)
        return Result(self.process.returncode, out, err)

    def survivors(self) -> list[int]:
        """Processes that carry the mark, wherever they went: children, fork server, resource tracker."""
        mark = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def assert_nothing_left(self) -> None:
        """Everything it started is gone, at once or within the moment that the kernel takes."""
        end = time.monotonic() + 5.0
        while (left := self.survivors()) and time.monotonic() < end:
            time.sleep(0.02)
        assert left == []


def script(*arguments: object, folder: Path, **options: Any) -> Result:
    """Run the console script to its end."""
    started = Script([str(argument) for argument in arguments], folder, **options)
    result = started.end()
    started.assert_nothing_left()
    return result


_finished: dict[str, tuple[Place, Result]] = {}


def finished_run(make: Callable[[], Path]) -> tuple[Place, Result]:
    """One uninterrupted run of the tiny space by the console script, shared by all tests of a session."""
    if "tiny" not in _finished:
        place = Place(make())
        _finished["tiny"] = place, script("run", *place.flags(), "--json", folder=place.folder)
    return _finished["tiny"]


def columns_of(place: Place) -> list[Column]:
    """The columns in a place's database."""
    return [Column.from_dict(json.loads(spec)) for (spec,) in place.rows("SELECT spec FROM grid_column")]


@contextlib.contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file of this process grows past ``size`` bytes: what a full disk looks like."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
