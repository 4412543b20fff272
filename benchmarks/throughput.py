"""How fast a study went, by its database: cells, checks and launches, and how busy its kernels kept the GPU.

    python benchmarks/throughput.py --db sqlite:///h200.db [--gap 60]

Rows carry the time at which they were stored. Times between two of them longer than ``--gap`` seconds are not
counted: nobody worked then (another call, a fresh machine). What lies before a stretch's first row, start and
self-test, is not counted either. Kernel time is that of the timed groups, counted by their own clock; what
proofs, warm-up and capture launch is not recorded, so the share is a lower bound. Needs no GPU.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from datetime import datetime
from itertools import pairwise

from sqlalchemy import select

from autotune.store.database import open_database
from autotune.store.errors import StoreError
from autotune.store.models import DecisionRow, ProofRow, RoundChunkRow, TrialRow


def stretches(times: Iterable[datetime], gap_s: float) -> list[tuple[datetime, datetime]]:
    """First and last time of each stretch of ``times`` without a pause longer than ``gap_s``."""
    ordered = sorted(times)
    if not ordered:
        return []
    breaks = [(a, b) for a, b in pairwise(ordered) if (b - a).total_seconds() > gap_s]
    starts = [ordered[0], *(b for _, b in breaks)]
    ends = [*(a for a, _ in breaks), ordered[-1]]
    return list(zip(starts, ends, strict=True))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--db", required=True, help="as for autotune run")
    parser.add_argument("--gap", type=float, default=60.0, help="seconds without a row that end a stretch")
    options = parser.parse_args()
    try:
        with open_database(options.db) as database, database.engine.connect() as connection:
            proofs = connection.execute(select(ProofRow.created_at, ProofRow.launches)).all()
            chunks = connection.execute(select(RoundChunkRow.created_at, RoundChunkRow.rounds)).all()
            trials = connection.execute(
                select(TrialRow.finished_at).where(TrialRow.state == "complete")
            ).all()
            decided = len(connection.execute(select(DecisionRow.cell_id)).all())
    except StoreError as error:
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
