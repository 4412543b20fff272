"""Random workloads inside the proven cells of a table, against the reference, in guarded memory.

    python benchmarks/soak.py tuned_configs/nvidia-h200.sglang.yaml --seconds 300 [--seed 1] [--device cuda]

Cells are drawn evenly from those where the table names a route; the route is the one that the router answers
there, on this machine: with another fingerprint than the table's it answers the fallback only, and there is
nothing to soak (exit 3). Every launch is judged as a proof's is (``autotune/checks/soak.py``). A failure
inside a proven cell, or a pass that needs a promise which the table does not ask of an engine, is a defect of
autotune: its line ends with the command that shows it again. Exit 1 if there was one.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from autotune.arena.factory import default_kind
from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult, CheckStatus
from autotune.hardware.collect import collect
from autotune.router import Router
from autotune.table.letters import RESERVED
from autotune.table.model import RoutingTable
from autotune.tuner.prover import repro_command
from autotune.worker.jobs import ProveJob, prove
from autotune.worker.worker import Worker


class Target(NamedTuple):
    """A cell where the table names a route, and what its proof requires."""

    column: Column
    kv_low: int
    kv_high: int
    requires: frozenset[str]


def targets(table: RoutingTable) -> list[Target]:
    """Captured cells whose letter names a route."""
    found = []
    for entry in table.entries:
        needs = {proof.route: frozenset(proof.requires) for proof in entry.proof}
        low = entry.q_len
        for row in entry.routes.rows:
            for size, letter in zip(entry.batch_size, row.letters, strict=True):
                if letter not in RESERVED:
                    column = Column(
                        entry.shape,
                        entry.dtypes,
                        entry.q_len,
                        size,
                        entry.max_context,
                        pad_value=table.policy.pad_value,
                    )
                    found.append(Target(column, low, row.kv_high, needs[table.legend[letter]]))
            low = row.kv_high + 1
    return found


def job_of(router: Router, target: Target, facts: Facts, seed: int) -> ProveJob:
    """What soaks the route that the router answers in ``target``."""
    column = target.column
    bound = router.bind(
        column.shape,
        column.dtypes,
        max_context=column.max_context,
        attests=target.requires,
        pad_value=column.pad_value,
    )
    return ProveJob(
        route=bound.route(column.batch_size, column.q_len, target.kv_high),
        check="soak",
        column=column.to_dict(),
        facts=facts.to_dict(),
        kv_lens=(target.kv_low, target.kv_high),
        seed=seed,
        device=facts.device,
        arena_kind=default_kind(facts.device),
        pad_value=column.pad_value,
    )


def defect(row: CheckResult, target: Target) -> str | None:
    """What of a soak contradicts the table; None if nothing does."""
    if row.kind is not None:
        return f"{row.kind.value}: {row.detail}"
    if new := sorted(set(row.requires) - target.requires):
        return f"requires {', '.join(new)}, which the table does not"
    return None


def main() -> int:
    """Soak, and print what was done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    options = parser.parse_args()

    facts = collect(options.device, threads=1)
    router = Router.load(options.table, facts=facts)
    print(router.status.reason)
    if router.table is None or not router.status.active:
        return 3
    cells = targets(router.table)
    if not cells:
        print("no cell of the table names a route")
        return 3
    rng = random.Random(options.seed)
    launches, runs, soaked = Counter[str](), Counter[str](), set[str]()
    failures: list[tuple[ProveJob, str]] = []
    undone: list[str] = []
    start = time.monotonic()
    with Worker(facts.device) as worker:
        while time.monotonic() - start < options.seconds:
            target = rng.choice(cells)
            job = job_of(router, target, facts, rng.getrandbits(31))
            row = prove(worker, job)
            launches[job.route] += row.launches
            runs[job.route] += 1
            soaked.add(f"{target.column.id} {target.kv_high}")
            if said := defect(row, target):
                failures.append((job, said))
            elif row.status is not CheckStatus.PASSED:
                undone.append(row.detail)
    seconds = time.monotonic() - start
    print("| route | runs | launches |")
    print("|---|---|---|")
    for route in sorted(runs):
        print(f"| {route} | {runs[route]} | {launches[route]} |")
    print(
        f"\n{sum(launches.values())} launches in {len(soaked)} of {len(cells)} cells, {seconds:.0f} s: "
        f"{len(failures)} failures, {len(undone)} not run"
    )
    for job, said in failures:
        print(f"{said}\n  {repro_command(job)}")
    for line in sorted(set(undone))[:5]:
        print(f"not run: {line}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
