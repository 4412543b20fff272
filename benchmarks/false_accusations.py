"""Every check on known-good routes, over many seeds: none may be accused.

    python benchmarks/false_accusations.py [--seeds 200] [--seconds 1500] [--device cpu] [--routes a,b]
        [--provers 4] [--memory 40]

Runs in children and in guarded memory, as a proof does. On the CPU the routes are ``torch-sdpa``,
``torch-splitkv`` and ``planted-clean``; on a GPU every built-in route that the machine supports and has the
kernels for. Seeds are the outer loop: where ``--seconds`` end it early, every route and column has had as
many checks, but for one seed's. An accusation is printed at once. Prints a row per route and column, then how
far the largest error of each check stayed below the bound (``checks/oracle.py``; launches that a check judges
by a tighter bound of its own, the ``uniform`` half of ``position_coded``, count against the column's), and
what a route passes only under (a requirement accuses nobody). Exit 1 if a route was accused, 3 if nothing
could be run.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from autotune.arena.factory import default_kind
from autotune.checks import oracle, registry
from autotune.checks.launch import arithmetic_of
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.domain.verdict import CheckStatus
from autotune.hardware.collect import collect
from autotune.hardware.errors import HardwareError
from autotune.hardware.memory import GIB
from autotune.routes import registry as routes
from autotune.tuner.crew import Crew, Task
from autotune.tuner.deadline import Deadline
from autotune.tuner.prover import repro_command, seed_of
from autotune.worker.base import WorkerError
from autotune.worker.jobs import ProveJob, child_route
from autotune.worker.worker import Worker
from benchmarks.ending import Pulse, ending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.domain.fingerprint import Facts
    from autotune.domain.verdict import CheckResult
    from autotune.routes.base import Route

CPU_ROUTES = ("torch-sdpa", "torch-splitkv", "planted-clean")
PROVERS = {"cpu": 1, "cuda": 4}
# Device memory of one check: K and V of scattered_pages, 2^31 elements each, and of the others.
FAR_BYTES, NEAR_BYTES = 9 * GIB, GIB
# A correct kernel that comes this near is in danger of being accused; a bound this far off sees little.
TIGHT, WIDE = 1.3, 4.0


@dataclass
class Seen:
    """What came of one route in one column."""

    launches: int = 0
    checks: int = 0
    passed: int = 0
    accused: list[str] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    requires: set[str] = field(default_factory=set)
    worst: dict[str, float] = field(default_factory=dict)

    def add(self, job: ProveJob, row: CheckResult) -> None:
        """Count a row; an accusation is told at once."""
        self.launches += row.launches
        self.checks += 1
        self.requires |= set(row.requires)
        if row.status is CheckStatus.FAILED and row.kind is not None:
            self.accused.append(f"{row.kind.value}: {row.detail}\n  {repro_command(job)}")
            print(f"ACCUSED: {self.accused[-1]}", flush=True)
        elif row.status is CheckStatus.PASSED:
            self.passed += 1
        elif row.status is not CheckStatus.NOT_APPLICABLE:
            self.undone.append(f"{job.route} in {row.check}: {row.detail or row.status.value}")
        if row.worst_error is not None:
            self.worst[row.check] = max(row.worst_error, self.worst.get(row.check, 0.0))


class Subject(NamedTuple):
    """A route in a column, and the bound that its errors are held to."""

    route: str
    column: Column
    bound: float


def columns(device: str) -> tuple[Column, ...]:
    """Small, and awkward as real ones are: groups, a query length that fills no tile, an interval."""
    cuda = device.partition(":")[0] == "cuda"
    shape = Shape(8, 1, 128, 64) if cuda else Shape(4, 2, 64, 16)
    context = 4096 if cuda else 512
    bf16, fp32, fp8 = (PROFILES[name] for name in ("bf16", "fp32", "fp8"))
    return (
        Column(shape, bf16, q_len=1, batch_size=3, max_context=context),
        Column(shape, bf16, q_len=4, batch_size=3, max_context=context),
        Column(shape, fp32, q_len=4, batch_size=2, max_context=context),
        Column(shape, fp8, q_len=4, batch_size=3, max_context=context),
        Column(shape, bf16, q_len=4, batch_size=3, max_context=context, interval=(2, 5)),
    )


def subjects(facts: Facts, names: list[str]) -> list[Subject]:
    """What can be run here; prints what cannot."""
    found = []
    for name in names:
        route = child_route(name)
        for column in columns(facts.device):
            if reason := _absent(route, column, facts):
                print(f"left out: {name} in {column}: {reason}")
            else:
                bound = oracle.bound(column, arithmetic_of(route, column, facts))
                found.append(Subject(name, column, bound))
    return found


def _absent(route: Route, column: Column, facts: Facts) -> str | None:
    available = getattr(route, "available", None)
    return route.supports(column, facts) or (available(column, facts) if callable(available) else None)


def job_of(subject: Subject, check: str, facts: Facts, seed: int) -> ProveJob:
    """The job that a proof would run with this seed."""
    column = subject.column
    return ProveJob(
        route=subject.route,
        check=check,
        column=column.to_dict(),
        facts=facts.to_dict(),
        kv_lens=(column.max_context // 8, column.max_context),
        seed=seed_of(seed, column.id, subject.route, check),
        device=facts.device,
        arena_kind=default_kind(facts.device),
        pad_value=column.pad_value,
    )


def task_of(job: ProveJob) -> Task:
    """One check by itself: a failure leaves the other checks of its route and seed as they are."""
    column = Column.from_dict(job.column)
    nbytes = FAR_BYTES if job.check == "scattered_pages" else NEAR_BYTES
    return Task(child_route(job.route), column, ((column, job),), nbytes)


def run(
    seen: dict[Subject, Seen],
    facts: Facts,
    *,
    seeds: Sequence[int],
    seconds: float,
    provers: int,
    memory: int | None,
) -> None:
    """Every check of every subject under each seed, until the time is over.

    Args:
        memory: bytes of the device that checks may take together.

    Raises:
        WorkerError: no child can be had.
    """
    tasks: list[Task] = []
    owner: dict[int, Subject] = {}
    for seed in seeds:
        for subject in seen:
            for check in registry.runs(subject.column, facts.device):
                tasks.append(task_of(job_of(subject, check, facts, seed)))
                owner[id(tasks[-1])] = subject
    deadline, pulse = Deadline(seconds), Pulse("false_accusations", time.monotonic())
    count = 0
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(facts.device)) for _ in range(provers)]
        rows = Crew(workers, memory).run(tasks, lambda: deadline.passed)
        with contextlib.closing(rows):
            for row in rows:
                count += 1
                seen[owner[id(row.task)]].add(row.job, row.result)
                pulse.beat(time.monotonic(), f"{count} of {len(tasks)} checks")


def report(seen: dict[Subject, Seen], facts: Facts) -> None:
    """Print the two tables."""
    print("\n| route | column | seeds | checks passed | launches | worst error | bound | accusations |")
    print("|---|---|---|---|---|---|---|---|")
    for subject, found in seen.items():
        worst = max(found.worst.values(), default=float("nan"))
        each = len(registry.runs(subject.column, facts.device))
        print(
            f"| {subject.route} | {subject.column} | {found.checks / each:.3g} | {found.passed} "
            f"| {found.launches} | {worst:.3g} | {subject.bound:.3g} | {len(found.accused)} |"
        )
    margins: dict[tuple[str, str], list[float]] = defaultdict(list)
    for subject, found in seen.items():
        dtypes = subject.column.dtypes
        for check, worst in found.worst.items():
            if worst > 0.0:
                margins[check, f"{dtypes.q}/{dtypes.kv}"].append(subject.bound / worst)
    print("\n| check | q/kv | bound / worst error, least to most over routes and columns | |")
    print("|---|---|---|---|")
    for (check, types), found_margins in sorted(margins.items()):
        least, most = min(found_margins), max(found_margins)
        word = "tight" if least < TIGHT else "wide" if least > WIDE else ""
        print(f"| {check} | {types} | {least:.2f} to {most:.2f} | {word} |")


def main(given: Sequence[str] | None = None) -> int:
    """Run the checks, print what they said."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1500.0, help="no check begins after them")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the others follow")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    parser.add_argument("--routes", help="instead of the known-good ones of the device")
    parser.add_argument("--provers", type=int, help="children at once (cpu: 1, GPU: 4)")
    parser.add_argument("--memory", type=float, default=40.0, metavar="GIB", help="GPU: for all checks (40)")
    options = parser.parse_args(given)

    try:
        facts = collect(options.device, threads=1)
        good = CPU_ROUTES if facts.device == "cpu" else tuple(routes.routes(facts.device))
        everything = subjects(facts, options.routes.split(",") if options.routes else list(good))
    except ValueError as error:  # no such device or route
        print(f"false_accusations: {error}", file=sys.stderr)
        return 2
    except HardwareError as error:
        print(f"false_accusations: {error}", file=sys.stderr)
        return 3
    if not everything:
        print("no known-good route can be run here")
        return 3
    seen = {subject: Seen() for subject in everything}
    start, lost = time.monotonic(), False
    try:
        with ending("false_accusations", options.seconds):
            run(
                seen,
                facts,
                seeds=range(options.seed, options.seed + options.seeds),
                seconds=options.seconds,
                provers=options.provers or PROVERS[facts.device],
                memory=int(options.memory * GIB) if facts.device == "cuda" else None,
            )
    except WorkerError as error:
        lost = True
        print(f"false_accusations: {error}", file=sys.stderr)
    report(seen, facts)
    accused = [line for found in seen.values() for line in found.accused]
    undone = sorted({line for found in seen.values() for line in found.undone})
    needs = [
        f"requires {need}: {subject.route} in {subject.column}"
        for subject, found in seen.items()
        for need in sorted(found.requires)
    ]
    print()
    for line in [*accused, *needs, *(f"not run: {line}" for line in undone[:10])]:
        print(line)
    launches = sum(found.launches for found in seen.values())
    print(
        f"{launches} launches, {sum(found.passed for found in seen.values())} checks passed in "
        f"{time.monotonic() - start:.0f} s: {len(accused)} accusations, {len(undone)} not run"
    )
    return 1 if accused or lost else 0


if __name__ == "__main__":
    sys.exit(main())
