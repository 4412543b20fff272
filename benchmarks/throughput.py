"""How fast a study went, by its database: cells, checks and launches, and how busy its kernels kept the GPU.

    python benchmarks/throughput.py --db SOURCE [--gap 60]
    python benchmarks/throughput.py --measure [--cells 16]

Rows carry the time at which they were stored. Times between two of them longer than ``--gap`` seconds are not
counted: nobody worked then (another call, a fresh machine). What lies before a stretch's first row, start and
self-test, is not counted either. Kernel time is that of the timed groups, counted by their own clock; what
proofs, warm-up and capture launch is not recorded, so the share is a lower bound. Needs no GPU.

``--measure`` runs a small study on this machine's CPU in a database of its own, without a self-test and
without a table, and times every call of the store and of Optuna from outside: what is spent in them is
exclusive (what one calls of the other is the other's), in wall time of the process that asks.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

from sqlalchemy import select

from autotune.store.database import open_database
from autotune.store.errors import StoreError
from autotune.store.models import DecisionRow, ProofRow, RoundChunkRow, TrialRow
from benchmarks.recorded import RecordedError, opened


def stretches(times: Iterable[datetime], gap_s: float) -> list[tuple[datetime, datetime]]:
    """First and last time of each stretch of ``times`` without a pause longer than ``gap_s``."""
    ordered = sorted(times)
    if not ordered:
        return []
    breaks = [(a, b) for a, b in pairwise(ordered) if (b - a).total_seconds() > gap_s]
    starts = [ordered[0], *(b for _, b in breaks)]
    ends = [*(a for a, _ in breaks), ordered[-1]]
    return list(zip(starts, ends, strict=True))


@dataclass
class Meter:
    """Wall seconds and calls by who spent them; what a call spends in another's is the other's."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _stack: list[list[Any]] = field(default_factory=list)  # [who, since when]

    def timed(self, who: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its time put down to ``who``."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            now = time.perf_counter()
            if self._stack:
                self.seconds[self._stack[-1][0]] += now - self._stack[-1][1]
            if not self._stack or self._stack[-1][0] != who:
                self.calls[who] += 1
            self._stack.append([who, now])
            try:
                return function(*args, **kwargs)
            finally:
                now = time.perf_counter()
                self.seconds[who] += now - self._stack.pop()[1]
                if self._stack:
                    self._stack[-1][1] = now

        return call

    @contextlib.contextmanager
    def watching(self, owner: type, who: str) -> Iterator[None]:
        """Time the public methods that ``owner`` defines itself, while inside."""
        before = {
            name: value
            for name, value in vars(owner).items()
            if isinstance(value, FunctionType) and not name.startswith("_")
        }
        for name, function in before.items():
            setattr(owner, name, self.timed(who, function))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(owner, name, function)


@dataclass(frozen=True)
class Measured:
    """A study's wall time, and what of it was spent in the store's and in Optuna's calls."""

    cells: int
    rounds: int
    wall_s: float
    seconds: dict[str, float]
    calls: dict[str, int]


def measure(cells: int, space: Path | None = None) -> Measured:
    """Settle the first ``cells`` cells of the CPU's space (or another's) in a database of its own.

    Raises:
        WorkerError: no child can be had.
        StoreError: the database cannot be written.
    """
    import optuna
    from rich.console import Console

    from autotune.cli.context import all_routes, ask, target
    from autotune.hardware.collect import collect
    from autotune.report.progress import ProgressView
    from autotune.store.measurements import Measurements
    from autotune.store.proofs import Proofs
    from autotune.store.queue import Queue
    from autotune.store.studies import Studies
    from autotune.tuner.crew import Crew
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.run import open_run
    from autotune.tuner.tuner import Tuner
    from autotune.worker.worker import Worker

    asked = ask(None if space else "cpu", "generic", space)
    place = target(asked, collect("cpu"))
    meter = Meter()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        database = stack.enter_context(open_database(f"sqlite:///{Path(folder) / 'measured.db'}"))
        run = stack.enter_context(open_run(database, place, all_routes("cpu"), tuning=True))
        timer = stack.enter_context(Worker("cpu", guard_allocations=False))
        prover = stack.enter_context(Worker("cpu"))
        view = stack.enter_context(ProgressView(Console(quiet=True)))
        stores: tuple[type, ...] = (Measurements, Proofs, Queue, Studies)
        optunas: tuple[type, ...] = (optuna.Study, optuna.Trial)
        for owner in (*stores, *optunas):
            stack.enter_context(meter.watching(owner, "store" if owner in stores else "Optuna"))
        start = time.perf_counter()
        progress = Tuner(run, Crew([prover], None), timer, view, Deadline(None), cells).sweep()
        wall = time.perf_counter() - start
        seconds, calls = dict(meter.seconds), dict(meter.calls)
        rounds = sum(len(run.repository.rounds(run.study, item.cell)) for item in run.cells)
    return Measured(progress.now, rounds, wall, seconds, calls)


def measured(found: Measured) -> str:
    """The table."""
    lines = [
        "| part | seconds | share of wall time | calls | ms a call | ms a cell |",
        "|---|---|---|---|---|---|",
    ]
    for who in ("store", "Optuna"):
        seconds, calls = found.seconds.get(who, 0.0), found.calls.get(who, 0)
        lines.append(
            f"| {who} | {seconds:.2f} | {seconds / found.wall_s:.1%} | {calls} "
            f"| {1e3 * seconds / max(calls, 1):.2f} | {1e3 * seconds / max(found.cells, 1):.1f} |"
        )
    rest = found.wall_s - sum(found.seconds.values())
    lines.append(f"| everything else | {rest:.2f} | {rest / found.wall_s:.1%} | | | |")
    rate = found.cells * 60 / found.wall_s
    return "\n".join([*lines, f"\n{found.cells} cells, {found.rounds} rounds, {rate:.1f} cells/min"])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", metavar="SOURCE", help="a database: .db, .db.xz, a URL")
    parser.add_argument("--gap", type=float, default=60.0, help="seconds without a row that end a stretch")
    parser.add_argument("--measure", action="store_true", help="run a small CPU study and time its parts")
    parser.add_argument("--cells", type=int, default=16, help="of --measure")
    parser.add_argument("--space", type=Path, help="of --measure, instead of the shipped one")
    options = parser.parse_args()
    if (options.db is None) != options.measure or options.cells < 1:
        parser.error("give --db or --measure, one of them; --cells must be at least 1")
    if options.measure:
        from autotune.worker.base import WorkerError

        try:
            print(measured(measure(options.cells, options.space)))
        except (StoreError, WorkerError) as error:
            print(f"throughput: {error}", file=sys.stderr)
            return 1
        return 0
    try:
        with opened(options.db) as database, database.engine.connect() as connection:
            proofs = connection.execute(select(ProofRow.created_at, ProofRow.launches)).all()
            chunks = connection.execute(select(RoundChunkRow.created_at, RoundChunkRow.rounds)).all()
            trials = connection.execute(
                select(TrialRow.finished_at).where(TrialRow.state == "complete")
            ).all()
            decided = len(connection.execute(select(DecisionRow.cell_id)).all())
    except RecordedError as error:
        print(f"throughput: {error}", file=sys.stderr)
        return 1
    if not proofs and not chunks:
        print(f"throughput: {options.db} holds no proof and no round", file=sys.stderr)
        return 1
    print(
        "| stretch | minutes | cells/min | checks/s | judged launches/s | timed launches/s | kernel share |"
    )
    print("|---|---|---|---|---|---|---|")
    times = [row[0] for row in (*proofs, *chunks)]
    spans = stretches(times, options.gap)
    sums = [0.0] * 6
    for index, (start, end) in enumerate(spans, 1):
        inside = [row for row in chunks if start <= row[0] <= end]
        groups = [
            (r["run_us"][name], r["calls"][name])
            for _, rounds in inside
            for r in rounds
            for name in r["order"]
        ]
        seconds = max((end - start).total_seconds(), 1e-9)
        counts = [
            seconds,
            float(sum(start <= row[0] <= end for row in trials if row[0] is not None)),
            float(sum(start <= row[0] <= end for row in proofs)),
            float(sum(row[1] for row in proofs if start <= row[0] <= end)),
            float(sum(calls for _, calls in groups)),
            sum(run_us * calls for run_us, calls in groups) / 1e6,
        ]
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
        print(line(str(index), counts))
    if len(spans) > 1:
        print(line("all", sums))
    print(f"\n{decided} decisions, {int(sums[3])} judged and {int(sums[4])} timed launches")
    return 0


def line(label: str, counts: list[float]) -> str:
    """A row of the table."""
    seconds, cells, checks, judged, timed, kernel_s = counts
    return (
        f"| {label} | {seconds / 60:.1f} | {cells * 60 / seconds:.0f} | {checks / seconds:.1f} "
        f"| {judged / seconds:.0f} | {timed / seconds:.0f} | {kernel_s / seconds:.1%} |"
    )


if __name__ == "__main__":
    sys.exit(main())
