"""Recorded rounds, wherever they lie: a study's database, its packed evidence, a recorder's JSON lines.

A source is a path (``.db``, ``.db.xz``, ``.jsonl``, ``.jsonl.xz``) or a database URL. Files are read through
a copy, so that opening an older database migrates the copy and leaves the file as it is. Of a database with
several studies ``SOURCE#ID`` names one, by the first digits of its id.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import combinations
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from autotune.bench.pools import draw_kv_lens
from autotune.bench.record import Round
from autotune.domain.cell import Cell, Column
from autotune.domain.decision import Reason
from autotune.store.database import Database, open_database
from autotune.store.errors import StoreError
from autotune.store.models import CellRow, ColumnRow, ProofRow, RoundChunkRow
from autotune.store.records import Study
from autotune.store.repository import Repository
from autotune.store.snapshot import snapshot
from autotune.tuner.book import TIMING
from autotune.tuner.prover import seed_of

if TYPE_CHECKING:
    from autotune.routes.base import Route
    from autotune.tuner.decide import Outcome
    from autotune.tuner.judge import Judge
    from autotune.tuner.standing import Evidence

Array = NDArray[np.float64]
# Chunks of a cell come within a second or so of each other; after a longer pause it was resumed.
RESUMED_AFTER_S = 30.0


class RecordedError(Exception):
    """A source cannot be read, or does not hold what was asked for: one line."""


@dataclass(frozen=True)
class Recording:
    """The rounds of one cell in one process, in order.

    Attributes:
        process: tells the processes of a source apart.
        rounds: those that count towards a test, dropped ones included.
        start_up: those thrown away before them, in the order they were run, where they were kept.
        chunk: rounds between two reports to the parent; 0 if not known.
    """

    cell: Cell
    process: str
    rounds: tuple[Round, ...]
    start_up: tuple[Round, ...] = ()
    chunk: int = 0

    @cached_property
    def routes(self) -> tuple[str, ...]:
        """Every route that was timed, by name."""
        return tuple(sorted({name for round_ in self.rounds for name in round_.order}))

    @cached_property
    def log_times(self) -> dict[str, Array]:
        """By route: log microseconds, one a round; NaN where it was not timed or the round was dropped."""
        return {name: log_times(self.rounds, name) for name in self.routes}

    @cached_property
    def places(self) -> dict[str, NDArray[np.int64]]:
        """By route: its place in each round's order, from 0; -1 where it was not timed."""
        return {
            name: np.array([r.order.index(name) if name in r.run_us else -1 for r in self.rounds])
            for name in self.routes
        }

    def both(self, a: str, b: str) -> NDArray[np.bool_]:
        """Rounds that count and have both routes."""
        if a not in self.log_times or b not in self.log_times:
            return np.zeros(len(self.rounds), dtype=bool)
        return ~np.isnan(self.log_times[a] - self.log_times[b])

    def log_ratios(self, a: str, b: str) -> Array:
        """log(time of a / time of b), one value for each round of :meth:`both`."""
        both = self.both(a, b)
        if not both.any():
            return np.empty(0)
        ratios: Array = (self.log_times[a] - self.log_times[b])[both]
        return ratios

    def log_lengths(self, seed: int) -> Array | None:
        """log of the total KV length of each round, drawn again from the study's seed.

        None if the stored orders are not those that this seed gives: then the lengths would be others too.
        """
        own = seed_of(seed, self.cell.id, TIMING)
        totals = []
        for round_ in self.rounds:
            rng = Random(f"{own}:{round_.index}")
            order = list(range(len(round_.order)))
            rng.shuffle(order)
            # who stood where before the shuffle; the same in every round with as many routes
            totals.append((np.log(sum(draw_kv_lens(self.cell, rng))), order))
        for length in {len(r.order) for r in self.rounds}:
            listed = {
                tuple(name for _, name in sorted(zip(order, r.order, strict=True)))
                for r, (_, order) in zip(self.rounds, totals, strict=True)
                if len(r.order) == length
            }
            sets = {frozenset(names) for names in listed}
            if len(listed) != len(sets):
                return None
        return np.array([total for total, _ in totals])

    @cached_property
    def runtime_us(self) -> float:
        """Median time of the quickest route."""
        return min(float(np.exp(np.nanmedian(times))) for times in self.log_times.values())


def log_times(rounds: Sequence[Round], name: str) -> Array:
    """log microseconds of a route in each round; NaN where it was not timed or the round was dropped."""
    times = [r.run_us.get(name, np.nan) if not r.dropped else np.nan for r in rounds]
    return np.log(np.array(times, dtype=np.float64))


@dataclass(frozen=True)
class Recordings:
    """All of a source: the device's name, the seed of its study, and what was left out."""

    where: str
    device: str
    items: tuple[Recording, ...]
    seed: int | None = None
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Every two routes that were timed together, by name."""
        return tuple(sorted({pair for item in self.items for pair in combinations(item.routes, 2)}))


def read(source: str) -> Recordings:
    """Every recorded round of a source.

    Raises:
        RecordedError: it cannot be read, or holds no rounds.
    """
    if _is_jsonl(source):
        found = _from_lines(source)
    else:
        with opened(source) as database:
            found = _from_database(source, database)
    if not found.items:
        raise RecordedError(f"{source}: holds no rounds")
    return found


@contextlib.contextmanager
def opened(source: str) -> Iterator[Database]:
    """The database of a source: a file through a copy, anything else by its URL.

    Raises:
        RecordedError: it cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = source.partition("#")[0].removeprefix("sqlite:///")
            copy = Path(folder) / "copy.db"
            url = path if "://" in path else f"sqlite:///{_copied(Path(path), copy)}"
            with open_database(url) as database:
                yield database
        except (StoreError, sqlite3.Error, OSError, lzma.LZMAError, EOFError) as error:
            text = str(error).replace(str(Path(folder) / "copy.db"), source)
            raise RecordedError(f"{source}: {text}") from error


def _copied(path: Path, copy: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError("no such file")
    if path.suffix == ".xz":
        copy.write_bytes(lzma.decompress(path.read_bytes()))
        return copy
    snapshot(path, copy)
    return copy


def _is_jsonl(source: str) -> bool:
    return source.endswith((".jsonl", ".jsonl.xz"))


def _from_database(source: str, database: Database) -> Recordings:
    study = study_of(database, source)
    query = (
        select(
            RoundChunkRow.cell_id,
            RoundChunkRow.created_at,
            RoundChunkRow.size,
            RoundChunkRow.rounds,
            ColumnRow.spec,
            CellRow.kv_low,
            CellRow.kv_high,
        )
        .join(
            CellRow,
            (CellRow.study_id == RoundChunkRow.study_id) & (CellRow.cell_id == RoundChunkRow.cell_id),
        )
        .join(ColumnRow, ColumnRow.id == CellRow.column_id)
        .where(RoundChunkRow.study_id == study.id)
        .order_by(RoundChunkRow.cell_id, RoundChunkRow.first_round)
    )
    items: list[Recording] = []
    before: tuple[str, datetime] | None = None
    with database.read() as session:
        for cell_id, at, size, rounds, spec, low, high in session.execute(query):
            found = tuple(Round.from_dict(each) for each in rounds)
            if before and before[0] == cell_id and (at - before[1]).total_seconds() < RESUMED_AFTER_S:
                last = items.pop()
                joined = (*last.rounds, *found)
                items.append(Recording(last.cell, last.process, joined, chunk=max(last.chunk, size)))
            else:
                cell = Cell(Column.from_dict(spec), low, high)
                items.append(Recording(cell, at.isoformat(), found, chunk=size))
            before = cell_id, at
    name = str(study.fingerprint.facts.hardware.get("name", study.fingerprint.facts.device))
    return Recordings(source, name, tuple(items), study.seed)


def _from_lines(source: str) -> Recordings:
    """See ``record_rounds.py`` for the lines."""
    items: list[Recording] = []
    notes: list[str] = []
    device, seed = "?", None
    number = 0
    try:
        opener = lzma.open if source.endswith(".xz") else open
        with opener(source, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                row = json.loads(line)
                if row["kind"] == "header":
                    device, seed = str(row["device"]), int(row["seed"])
                elif row["kind"] == "rounds":
                    items.append(
                        Recording(
                            Cell.from_dict(row["cell"]),
                            f"process {row['process']}",
                            tuple(Round.from_dict(each) for each in row["rounds"]),
                            tuple(Round.from_dict(each) for each in row["start_up"]),
                            int(row["chunk"]),
                        )
                    )
                elif row["kind"] == "note":
                    notes.append(f"process {row['process']}, {row['cell']}: {row['text']}")
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise RecordedError(f"{source}: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RecordedError(f"{source}: line {number} is no line of record_rounds.py: {error}") from error
    return Recordings(source, device, tuple(item for item in items if item.rounds), seed, tuple(notes))


def study_of(database: Database, source: str) -> Study:
    """The database's study; the one that the source names where there are several.

    Raises:
        RecordedError: there is none, or several and none is named.
    """
    path, _, start = source.partition("#")
    studies = Repository(database).studies()
    found = [each for each in studies if each.id.startswith(start)]
    if len(found) != 1:
        ids = ", ".join(each.id for each in studies) or "none"
        raise RecordedError(f"{source}: one study is wanted, there are {ids}; {path}#ID names one")
    return found[0]


@dataclass(frozen=True)
class JudgedCell:
    """A cell with stored rows, and what the decision rule makes of them.

    Attributes:
        settled: under the objective asked for, no proof and no test of a first process is open.
    """

    cell: Cell
    models: tuple[str, ...]
    evidence: Evidence
    outcome: Outcome
    settled: bool

    @property
    def choice(self) -> str:
        """The route that the router would be told."""
        return self.outcome.decision.route or self.evidence.fallback

    @property
    def waits(self) -> bool:
        """Whether all that the cell's letter lacks is a second process."""
        return self.settled and self.outcome.decision.reason is Reason.UNPROVEN

    @property
    def final(self) -> bool:
        """Whether no further call could change the cell's letter."""
        return self.settled and not self.waits


@dataclass(frozen=True)
class JudgedStudy:
    """A study under one engine. It may be used while its database is open."""

    where: str
    study: Study
    judge: Judge
    cells: tuple[JudgedCell, ...]


def judged(
    database: Database,
    where: str,
    engine: str,
    *,
    space: Path | None = None,
    objective: str | None = None,
) -> JudgedStudy:
    """Decide every cell of a study that has proofs or rounds, for one engine; runs nothing, writes nothing.

    Args:
        space: the study's search space, if it is not the shipped one.
        objective: one of the study's; its first if None.

    Raises:
        RecordedError: it is not a study of that space, or has not that objective.
    """
    from autotune.bench.eprocess import SignTest, Unit
    from autotune.cli.context import all_routes, ask, target
    from autotune.cli.exits import CliError
    from autotune.space.errors import SpaceError
    from autotune.tuner.book import ProofBook
    from autotune.tuner.decide import answer
    from autotune.tuner.judge import Judge
    from autotune.tuner.memo import Known
    from autotune.tuner.run import ALPHA
    from autotune.tuner.standing import Question

    chosen = study_of(database, where)
    if objective is not None and objective not in chosen.objectives:
        raise RecordedError(f"--objective {objective}: the study resolved {', '.join(chosen.objectives)}")
    facts = chosen.fingerprint.facts
    try:
        asked = ask(None if space else chosen.space_name, engine, space)
        routes: dict[str, Route] = all_routes(facts.device)
    except (CliError, SpaceError) as error:
        raise RecordedError(str(error)) from error
    with database.read() as session:
        proven = set(session.scalars(select(ProofRow.route).distinct()))
        timed = set(
            session.scalars(
                select(RoundChunkRow.cell_id).where(RoundChunkRow.study_id == chosen.id).distinct()
            )
        )
    repository = Repository(database)
    routes = {name: route for name, route in routes.items() if name in proven}
    book = ProofBook(repository, chosen.fingerprint)
    judge = Judge(
        target(asked, facts),
        routes,
        repository,
        chosen,
        book,
        SignTest(chosen.margin, chosen.multiplicity, ALPHA, unit=Unit(chosen.unit)),
    )
    name = objective or judge.objectives.first
    cells = []
    for item in repository.cells(chosen):
        has_proofs = any(book.knows(route, item.cell.column) for route in routes.values())
        if not has_proofs and item.cell.id not in timed:
            continue
        try:
            by = judge.objectives.of(item.cell.column)[name]
        except KeyError:
            raise RecordedError(
                f"{where}: {item.cell} is not in the search space {asked.grid.space.gpu}; name its own with "
                "--space"
            ) from None
        evidence = judge.evidence(item.cell)
        found = answer(evidence, judge.test, Question(by, judge.tau(name)))
        known = Known.of(evidence, found)
        settled = known.proven and not known.live
        cells.append(JudgedCell(item.cell, item.models, evidence, found.outcome, settled))
    return JudgedStudy(where, chosen, judge, tuple(cells))


def ended(run: Callable[[], None], name: str) -> int:
    """Exit status of a script's body: 1, with one line on stderr, where a source cannot be used.

    A reader that has gone (``| head``) has seen enough: that is no failure.
    """
    try:
        run()
        sys.stdout.flush()
    except RecordedError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    except BrokenPipeError:
        # the interpreter flushes once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers as they are given."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
