"""Random workloads inside the proven cells of a table, against the reference, in guarded memory.

    python benchmarks/soak.py tuned_configs/nvidia-h200.sglang.yaml --seconds 300 [--seed 1] [--device cuda]
        [--provers 2] [--memory 16]

Cells are drawn evenly from those where the table names a route; the route is the one that the router answers
there, on this machine: with another fingerprint than the table's it answers the fallback only, and there is
nothing to soak (exit 3). Every launch is judged as a proof's is (``autotune/checks/soak.py``). A failure
inside a proven cell, or a pass that needs a promise which the table does not ask of an engine, is a defect of
autotune: its line, printed at once, ends with the command that shows it again. Exit 1 if there was one.

``--memory`` is for a device that others use too: cells of which one launch may take more are left out and
counted, a layer kind at a time, and launches run side by side only as far as they fit.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autotune.arena.factory import default_kind
from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult, CheckStatus
from autotune.hardware.collect import collect
from autotune.hardware.errors import HardwareError
from autotune.hardware.memory import GIB, operand_bytes
from autotune.router import Router
from autotune.table.letters import RESERVED
from autotune.table.model import RoutingTable
from autotune.tuner.crew import Crew, Task
from autotune.tuner.deadline import Deadline
from autotune.tuner.prover import repro_command
from autotune.worker.base import WorkerError
from autotune.worker.jobs import ProveJob, child_route
from autotune.worker.worker import Worker
from benchmarks.ending import Pulse, ending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.domain.dtypes import DTypes
    from autotune.domain.shape import Shape
    from autotune.router.bound import Bound

PROVERS = {"cpu": 1, "cuda": 2}
# Of the device's memory, where nobody else uses it.
SHARE = 0.7
WORKSPACE_BYTES = 512 * 2**20
# More than a child does: 65 launches a second were the quickest proofs on an H200, and a run makes 16.
RUNS_PER_SECOND = 8


class Target(NamedTuple):
    """A cell where the table names a route, what its proof requires, and the layers that it is of."""

    column: Column
    kv_low: int
    kv_high: int
    requires: frozenset[str]
    layers: str

    @property
    def key(self) -> tuple[str, int]:
        """Which cell it is."""
        return self.column.id, self.kv_high


def targets(table: RoutingTable) -> list[Target]:
    """Captured cells whose letter names a route."""
    found = []
    for entry in table.entries:
        needs = {proof.route: frozenset(proof.requires) for proof in entry.proof}
        layers = f"{', '.join(entry.models)}, {entry.dtypes.kv} KV"
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
                    found.append(Target(column, low, row.kv_high, needs[table.legend[letter]], layers))
            low = row.kv_high + 1
    return found


def nbytes(target: Target) -> int:
    """Device memory of one launch: the pool, its pages that are withheld from ``prepare``, twice.

    Lengths are drawn below the longest: their mean is half of it, and the more rows, the nearer to that.
    """
    batch = target.column.batch_size
    share = min(1.0, 0.5 + batch**-0.5)
    return 3 * operand_bytes(target.column, int(target.kv_high * share)) + WORKSPACE_BYTES


def job_of(router: Router, target: Target, facts: Facts, seed: int) -> ProveJob:
    """What soaks the route that the router answers in ``target``."""
    column = target.column
    bound = _bound(router, column.shape, column.dtypes, column.max_context, target.requires, column.pad_value)
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


@cache
def _bound(
    router: Router, shape: Shape, dtypes: DTypes, max_context: int, attests: frozenset[str], pad_value: int
) -> Bound:
    """Bound once a kind of layer, as an engine does: thousands of cells are drawn."""
    return router.bind(shape, dtypes, max_context=max_context, attests=attests, pad_value=pad_value)


def defect(row: CheckResult, target: Target) -> str | None:
    """What of a soak contradicts the table; None if nothing does."""
    if row.kind is not None:
        return f"{row.kind.value}: {row.detail}"
    if new := sorted(set(row.requires) - target.requires):
        return f"requires {', '.join(new)}, which the table does not"
    return None


@dataclass
class Soaked:
    """What came of it.

    Attributes:
        undone: why a launch could not be made or judged: that accuses nobody.
    """

    launches: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    cells: set[tuple[str, int]] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    undone: Counter[str] = field(default_factory=Counter)

    def add(self, job: ProveJob, row: CheckResult, target: Target) -> None:
        """Count a row; a defect is told at once."""
        self.launches[job.route] += row.launches
        self.runs[job.route] += 1
        self.cells.add(target.key)
        if said := defect(row, target):
            self.failures.append(f"{said}\n  {repro_command(job)}")
            print(f"FAILED: {self.failures[-1]}", flush=True)
        elif row.status is not CheckStatus.PASSED:
            self.undone[f"{job.route}: {row.detail or row.status.value}"] += 1

    def line(self) -> str:
        """How far it has come."""
        return (
            f"{sum(self.launches.values())} launches, {sum(self.runs.values())} runs, "
            f"{len(self.failures)} failures, {sum(self.undone.values())} not run"
        )

    def report(self, named: Sequence[Target], fitting: Sequence[Target], seconds: float) -> None:
        """The tables, and what was not done.

        Args:
            named: cells where the table names a route.
            fitting: those of them that were drawn from.
        """
        print("| route | runs | launches |")
        print("|---|---|---|")
        for route in sorted(self.runs):
            print(f"| {route} | {self.runs[route]} | {self.launches[route]} |")
        print("\n| layers | cells | of these left out for --memory | launched |")
        print("|---|---|---|---|")
        every, fit = Counter(t.layers for t in named), Counter(t.layers for t in fitting)
        launched = Counter(t.layers for t in fitting if t.key in self.cells)
        for layers in sorted(every):
            left_out = every[layers] - fit[layers]
            print(f"| {layers} | {every[layers]} | {left_out} | {launched[layers]} |")
        print()
        for failure in self.failures:
            print(failure)
        for line, count in self.undone.most_common(5):
            print(f"not run, {count} times: {line}")
        if left_out := len(named) - len(fitting):
            print(f"left out: {left_out} cells that may take more memory than --memory allows")
        print(
            f"\n{sum(self.launches.values())} launches in {len(self.cells)} of {len(named)} cells, "
            f"{seconds:.0f} s: {len(self.failures)} failures, {sum(self.undone.values())} not run"
        )


def soak(
    router: Router,
    cells: Sequence[Target],
    facts: Facts,
    found: Soaked,
    *,
    seconds: float,
    seed: int,
    provers: int,
    memory: int | None,
) -> None:
    """Draw cells and soak them until the time is over.

    Args:
        memory: bytes that launches may take together.

    Raises:
        WorkerError: no child can be had.
    """
    rng = random.Random(seed)
    drawn: dict[int, tuple[Target, Task]] = {}
    for _ in range(max(1, int(seconds * RUNS_PER_SECOND * provers))):
        target = rng.choice(cells)
        job = job_of(router, target, facts, rng.getrandbits(31))
        task = Task(child_route(job.route), target.column, ((target.column, job),), nbytes(target))
        drawn[id(task)] = target, task
    deadline, pulse = Deadline(seconds), Pulse("soak", time.monotonic())
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(facts.device)) for _ in range(provers)]
        rows = Crew(workers, memory).run([task for _, task in drawn.values()], lambda: deadline.passed)
        with contextlib.closing(rows):
            for row in rows:
                found.add(row.job, row.result, drawn[id(row.task)][0])
                pulse.beat(time.monotonic(), found.line())


def main(given: Sequence[str] | None = None) -> int:
    """Soak, and print what was done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="no launch begins after them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    parser.add_argument("--provers", type=int, help="children at once (cpu: 1, GPU: 2)")
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="GPU: for all launches (70 %% of the device's)"
    )
    options = parser.parse_args(given)
    try:
        facts = collect(options.device, threads=1)
    except (ValueError, HardwareError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 3
    router = Router.load(options.table, facts=facts)
    print(router.status.reason, flush=True)
    if router.table is None or not router.status.active:
        return 3
    device = facts.hardware.get("memory_gib") if facts.device == "cuda" else None
    whole = options.memory or (float(device) * SHARE if isinstance(device, (int, float)) else None)
    memory = None if whole is None else int(whole * GIB)
    named = targets(router.table)
    cells = [target for target in named if memory is None or nbytes(target) <= memory]
    if not cells:
        print("no cell of the table names a route" if not named else "--memory: no cell fits into it")
        return 3
    found, start = Soaked(), time.monotonic()
    try:
        with ending("soak", options.seconds):
            soak(
                router,
                cells,
                facts,
                found,
                seconds=options.seconds,
                seed=options.seed,
                provers=options.provers or PROVERS[facts.device],
                memory=memory,
            )
    except WorkerError as error:
        print(f"soak: {error}", file=sys.stderr)
        found.report(named, cells, time.monotonic() - start)
        return 1
    found.report(named, cells, time.monotonic() - start)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
