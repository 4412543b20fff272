"""A recording in a small SQLite file: what a replay looks at and nothing else.

    about        key, value: the format's number, the study, its facts (JSON)
    grid_column  number, what it is (JSON)
    cell         number (the study's), column, rank in the queue, KV row, models, chunks as
                 [[rounds, seconds], ...], rounds (see packing.py), the stored decision (JSON); null if none
    again        rounds of a cell in each later process, and whether it was begun to measure tau
    proof        one row a check; seed is null where it follows from the study's, more (JSON) holds what most
                 rows leave empty

Left out: commands that repeat a check, placements, moments, Optuna's tables, the self-test.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from autotune.domain.cell import Cell, Column
from autotune.domain.decision import Decision, Reason
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult
from autotune.replay.errors import RecordingError
from autotune.replay.recording import RecordedAgain, RecordedCheck, RecordedTiming, Recording
from autotune.replay.study_file import Choose
from autotune.store.records import Fingerprint, Study, StudyCell
from autotune.tuner.prover import seed_of

FORMAT = "autotune/recording/2"
# The first had no later processes.
READS = ("autotune/recording/1", FORMAT)
TABLE = "about"

_SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE grid_column (number INTEGER PRIMARY KEY, spec TEXT NOT NULL);
CREATE TABLE cell (
    number INTEGER PRIMARY KEY, column_number INTEGER NOT NULL, position INTEGER NOT NULL,
    kv_low INTEGER NOT NULL, kv_high INTEGER NOT NULL, models TEXT NOT NULL,
    chunks TEXT, rounds BLOB, decision TEXT);
CREATE TABLE again (
    cell_number INTEGER NOT NULL, process INTEGER NOT NULL, sampled INTEGER NOT NULL, rounds BLOB NOT NULL,
    PRIMARY KEY (cell_number, process)) WITHOUT ROWID;
CREATE TABLE proof (
    column_number INTEGER NOT NULL, cell_number INTEGER, route TEXT NOT NULL, route_version INTEGER NOT NULL,
    check_name TEXT NOT NULL, check_version INTEGER NOT NULL, status TEXT NOT NULL, seed INTEGER,
    launches INTEGER NOT NULL, worst_error, seconds REAL NOT NULL, more TEXT);
"""
_STUDY = (
    "id",
    "space_name",
    "space_digest",
    "engine",
    "margin",
    "multiplicity",
    "unit",
    "seed",
    "code_version",
)
_MORE = ("kind", "reason", "detail", "requires", "limits", "slack")


def write_thinned(recording: Recording, path: Path) -> None:
    """Write ``recording`` to a new file at ``path``.

    Raises:
        sqlite3.Error, OSError: it cannot be written.
    """
    study = recording.study
    columns = {
        column: i for i, column in enumerate(dict.fromkeys(item.cell.column for item in recording.cells))
    }
    numbers = {item.cell.id: item.number for item in recording.cells}
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(_SCHEMA)
        about = {
            "format": FORMAT,
            "study": _dumps(
                {
                    **{name: getattr(study, name) for name in _STUDY},
                    "objectives": study.objectives,
                    "created_at": study.created_at.isoformat(),
                }
            ),
            "facts": _dumps(study.fingerprint.facts.to_dict()),
        }
        connection.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        connection.executemany(
            "INSERT INTO grid_column VALUES (?, ?)",
            [(number, _dumps(column.to_dict())) for column, number in columns.items()],
        )
        for item in recording.cells:
            cell, timing = item.cell, recording.timings.get(item.cell.id)
            decision = recording.decisions.get(cell.id)
            row = (
                item.number,
                columns[cell.column],
                item.position,
                cell.kv_low,
                cell.kv_high,
                _dumps(item.models),
                None if timing is None else _dumps(timing.chunks),
                None if timing is None else timing.packed,
                None if decision is None else _dumps(asdict(decision)),
            )
            connection.execute("INSERT INTO cell VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        connection.executemany(
            "INSERT INTO proof VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [_proof(check, study.seed, columns, numbers) for check in recording.checks],
        )
        connection.executemany(
            "INSERT INTO again VALUES (?, ?, ?, ?)",
            [
                (numbers[cell_id], process, each.sampled, each.packed)
                for cell_id, processes in recording.again.items()
                for process, each in enumerate(processes, 1)
            ],
        )
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM")


def _proof(
    check: RecordedCheck, seed: int, columns: dict[Column, int], numbers: dict[str, int]
) -> tuple[Any, ...]:
    result = check.result
    data = result.to_dict()
    more = {name: data[name] for name in _MORE if data[name]}
    error = result.worst_error
    target = check.cell_id or check.column.id
    return (
        columns[check.column],
        None if check.cell_id is None else numbers[check.cell_id],
        check.route,
        check.route_version,
        result.check,
        result.version,
        result.status.value,
        None if result.seed == seed_of(seed, target, check.route, result.check) else result.seed,
        result.launches,
        "NaN" if error is not None and math.isnan(error) else error,
        check.seconds,
        _dumps(more) if more else None,
    )


def read_thinned(path: Path, where: str, choose: Choose) -> Recording:
    """The study of the file, if ``choose`` takes it.

    Raises:
        RecordingError: another version's format, or rows that make no sense; and from ``choose``.
        sqlite3.Error: the file is damaged.
    """
    with contextlib.closing(sqlite3.connect(path)) as connection:
        try:
            about = dict(connection.execute("SELECT key, value FROM about"))
            if about.get("format") not in READS:
                raise RecordingError(
                    f"{where}: is in the format {about.get('format')!r}, this version reads {FORMAT!r}; make "
                    "it again with scripts/thin_evidence.py"
                )
            return _read(connection, where, about, choose)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise RecordingError(
                f"{where}: a row that cannot be read ({type(error).__name__}: {error}); make the file "
                "again with scripts/thin_evidence.py"
            ) from None


def _read(connection: sqlite3.Connection, where: str, about: dict[str, str], choose: Choose) -> Recording:
    said = json.loads(about["study"])
    study = Study(
        fingerprint=Fingerprint.of(Facts.from_dict(json.loads(about["facts"]))),
        objectives=tuple(said["objectives"]),
        created_at=datetime.fromisoformat(said["created_at"]),
        **{name: said[name] for name in _STUDY},
    )
    columns = {
        number: Column.from_dict(json.loads(spec))
        for number, spec in connection.execute("SELECT number, spec FROM grid_column")
    }
    cells, timings, decisions = {}, {}, {}
    query = (
        "SELECT number, column_number, position, kv_low, kv_high, models, chunks, rounds, decision FROM cell"
    )
    for number, column, position, low, high, models, chunks, rounds, decision in connection.execute(query):
        cell = Cell(columns[column], low, high)
        cells[number] = StudyCell(cell, number, position, tuple(json.loads(models)))
        if chunks is not None:
            timings[cell.id] = RecordedTiming(
                rounds, tuple((size, seconds) for size, seconds in json.loads(chunks))
            )
        if decision is not None:
            data = json.loads(decision)
            decisions[cell.id] = Decision(**{**data, "reason": Reason(data["reason"])})
    choose([(study, frozenset(item.cell.id for item in cells.values()))])
    checks = tuple(
        _check(row, study.seed, columns, cells)
        for row in connection.execute("SELECT * FROM proof ORDER BY rowid")
    )
    again: dict[str, tuple[RecordedAgain, ...]] = {}
    if about["format"] == FORMAT:
        rows = connection.execute(
            "SELECT cell_number, sampled, rounds FROM again ORDER BY cell_number, process"
        )
        for number, sampled, rounds in rows:
            cell_id = cells[number].cell.id
            again[cell_id] = (*again.get(cell_id, ()), RecordedAgain(bool(sampled), rounds))
    queue = sorted(cells.values(), key=lambda item: (item.position, item.number))
    return Recording(where, study, tuple(queue), checks, timings, decisions, again)


def _check(
    row: tuple[Any, ...], study_seed: int, columns: dict[int, Column], cells: dict[int, StudyCell]
) -> RecordedCheck:
    column, number, route, route_version, check, version, status, seed, launches, error, seconds, more = row
    cell_id = None if number is None else cells[number].cell.id
    if seed is None:
        seed = seed_of(study_seed, cell_id or columns[column].id, route, check)
    data = {
        **{"kind": None, "reason": None, "detail": "", "requires": (), "limits": (), "slack": 0},
        **(json.loads(more) if more else {}),
        **{"check": check, "version": version, "status": status, "seed": seed, "launches": launches},
        "worst_error": None if error is None else float(error),
        "placements": (),
    }
    return RecordedCheck(columns[column], cell_id, route, route_version, CheckResult.from_dict(data), seconds)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
