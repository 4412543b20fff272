"""What safety costs: guarded memory against plain, the arena, a whole check, compute-sanitizer; in one run.

    python benchmarks/guard_cost.py [--device cuda] [--routes xqa-decode,fa2] [--seconds 1] [--limit 120]
        [--json FILE]

Launches: in one process each route is opened twice in a column, on equal operands, in a guarded arena and in
a plain one. A round runs both in random order; its value is the ratio guarded / plain. 1.00 is expected: a
guard is an address that is not mapped, not an instruction. On the CPU the time is the thread's, on CUDA that
of a graph's replay between events, caches cold; what a route allocates through torch is then guarded as well.

Set-up: the arena with everything that the column's operands and the route's session ask for, opened and left;
the guarded one writes its canary pattern over all of it, the plain one touches nothing.

Checks: one check as a run makes it, in a worker's child, guarded and plain in random order; then, once, every
check of the column in guarded memory. On CUDA, where compute-sanitizer works, launches in a process of its
own with the tool and without (``sanitizer_cost.py``), for which 70 s of ``--limit`` are kept.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from autotune.arena import cuda_allocator
from autotune.arena.base import Arena
from autotune.arena.factory import default_kind, open_arena
from autotune.arena.operands import Operands, Recipe, build, capacity_of
from autotune.checks import registry
from autotune.checks.blame import is_device_error
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import CheckStatus
from autotune.hardware.collect import collect
from autotune.hardware.errors import HardwareError
from autotune.routes.base import Allocate, Capture, Need, Route, Session
from autotune.routes.registry import routes
from autotune.sanitizer import tool as sanitizer
from autotune.tuner.deadline import Deadline
from autotune.worker.jobs import ProveJob, prove
from autotune.worker.worker import Worker
from benchmarks import sanitizer_cost
from benchmarks.ending import ending
from benchmarks.sanitizer_cost import Look

PLAIN = "plain"
WARM_UP = 3
LEAST_ROUNDS = 20
REPLAYS = 10  # of a graph, in a round
SETUPS = 9
CHECKS = 5
CHECK = "reference"
# Kept of --limit for the processes with the tool and without it: a proof under it takes 7 to 8 s on an H200.
SANITIZER_S = 70.0

Request = tuple[str, tuple[int, ...], torch.dtype, "int | None"]


@dataclass(frozen=True)
class Case:
    """A column and the length of its launches."""

    column: Column
    kv_len: int


@dataclass(frozen=True)
class Paired:
    """Two ways to do the same, in turn.

    Attributes:
        first, second: medians; microseconds of launches, seconds of all else.
        ratio: median of the rounds' ratios first / second.
        middle: ends of the middle 80 % of the ratios.
    """

    first: float
    second: float
    ratio: float
    middle: tuple[float, float]
    rounds: int


@dataclass(frozen=True)
class Cost:
    """Everything of one route in one case."""

    route: str
    case: str
    kv_len: int
    launch_us: Paired
    setup_s: Paired
    operands: int
    mib: float
    check_s: Paired
    all_checks: int
    all_checks_s: float


def cases(device: str) -> list[Case]:
    """A few columns, from one request to many: a short launch shows a cost that a long one hides."""
    if device == "cpu":
        shape, lengths, context = Shape(8, 1, 128, 16), ((4, 1, 256), (1, 4, 1024), (4, 8, 1024)), 2048
    else:
        shape, lengths, context = Shape(8, 1, 128, 64), ((4, 1, 1024), (4, 16, 4096), (4, 64, 8192)), 131072
    return [Case(Column(shape, PROFILES["bf16"], q_len, batch, context), kv) for q_len, batch, kv in lengths]


def paired(
    ways: tuple[Callable[[], float], Callable[[], float]],
    rng: random.Random,
    rounds: int,
    until: float = 0.0,
) -> Paired:
    """Rounds of both ways in random order: at least so many, and until the monotonic time ``until``."""
    times: tuple[list[float], list[float]] = ([], [])
    while len(times[0]) < rounds or time.monotonic() < until:
        for index in rng.sample((0, 1), 2):
            times[index].append(ways[index]())
    ratios = [a / b for a, b in zip(*times, strict=True)]
    ends = statistics.quantiles(ratios, n=10) if len(ratios) > 1 else [ratios[0]] * 2
    return Paired(
        statistics.median(times[0]),
        statistics.median(times[1]),
        statistics.median(ratios),
        (ends[0], ends[-1]),
        len(ratios),
    )


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Opened:
    """A route on operands in one arena, ready to run again and again."""

    def __init__(self, route: Route, case: Case, recipe: Recipe, arena: Arena, device: str) -> None:
        self.requests: list[Request] = []
        self.device = device
        self.operands: Operands = build(self._noting(arena), case.column, recipe, device)
        if Need.HOST_KV_LENS not in route.needs:
            self.operands.step.host_kv_lens = None
        noting = self._noting(arena)

        def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return noting.tensor(name, shape, dtype)

        with contextlib.ExitStack() as stack:
            if arena.guarded and device != "cpu":
                stack.enter_context(cuda_allocator.guarding())
            self.session = self._opened(route, case, recipe, allocate)
            self.launch = self._launch(route)

    def _opened(self, route: Route, case: Case, recipe: Recipe, allocate: Allocate) -> Session:
        session = route.open(capacity_of(case.column, recipe, self.device), allocate)
        session.prepare(self.operands.step)
        for _ in range(WARM_UP):
            session.run(self.operands.out)
        return session

    def _launch(self, route: Route) -> Callable[[], None]:
        run = partial(self.session.run, self.operands.out)
        if self.device == "cpu" or route.capture is Capture.NO:
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # what the launch allocates is mapped by driver calls that a stricter mode may refuse
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            run()
        finally:
            graph.capture_end()
        return graph.replay

    def _noting(self, arena: Arena) -> Arena:
        return _Noting(arena, self.requests)


class _Noting:
    """An arena that notes what is asked of it."""

    def __init__(self, arena: Arena, requests: list[Request]) -> None:
        self.kind, self.guarded = arena.kind, arena.guarded
        self.placement, self.slack = arena.placement, arena.slack
        self.overwritten = arena.overwritten
        self._arena, self._requests = arena, requests

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, align: int | None = None
    ) -> torch.Tensor:
        """See :class:`autotune.arena.base.Arena`."""
        self._requests.append((name, tuple(shape), dtype, align))
        return self._arena.tensor(name, shape, dtype, align=align)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *what: object) -> None:
        """Whoever opened the arena leaves it."""


class Meter:
    """Times launches on one kind of device."""

    def __init__(self, device: str) -> None:
        self._gpu = None
        if device != "cpu":
            from autotune.bench.cuda_clock import TorchGpu

            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            self._gpu = TorchGpu(int(properties.L2_cache_size))

    def __call__(self, launch: Callable[[], None]) -> float:
        """Microseconds of one launch."""
        if self._gpu is not None:
            return self._gpu.timed(launch, REPLAYS) / REPLAYS
        start = time.thread_time_ns()
        launch()
        return (time.thread_time_ns() - start) / 1e3


def recipe_of(case: Case, seed: int) -> Recipe:
    """Ragged lengths in (kv / 2, kv], the longest one first."""
    rng = random.Random(seed)
    low = max(case.column.q_len, case.kv_len // 2 + 1)
    others = [rng.randint(low, case.kv_len) for _ in range(case.column.batch_size - 1)]
    return Recipe((case.kv_len, *others), seed=seed)


def launches(
    route: Route, case: Case, device: str, meter: Meter, rng: random.Random, seconds: float
) -> tuple[Paired, list[Request]]:
    """Guarded launches against plain ones.

    Raises:
        RuntimeError: the two do not compute the same, so that there is nothing to compare.
    """
    recipe = recipe_of(case, rng.getrandbits(31))
    with (
        torch.inference_mode(),
        cuda_allocator.holding(),  # what a captured launch allocated stays mapped until the last replay
        open_arena(default_kind(device), device) as guarded,
        open_arena(PLAIN, device) as plain,
    ):
        pair = [Opened(route, case, recipe, arena, device) for arena in (guarded, plain)]
        first, second = pair
        until = time.monotonic() + seconds
        ways = (partial(meter, first.launch), partial(meter, second.launch))
        found = paired(ways, rng, LEAST_ROUNDS, until)
        out, other = first.operands.out, second.operands.out
        if not torch.allclose(out.float(), other.float(), rtol=0.02, atol=0.02):
            raise RuntimeError(f"{route.name}: guarded and plain launches gave different results")
        for opened in pair:
            opened.session.close()
    return found, first.requests


def set_up(requests: list[Request], kind: str, device: str) -> None:
    """Open an arena, ask everything of it, leave it."""
    with open_arena(kind, device) as arena:
        for name, shape, dtype, align in requests:
            arena.tensor(name, shape, dtype, align=align)
        if device != "cpu":
            torch.cuda.synchronize()


def job_of(route: Route, case: Case, facts: Facts, check: str, arena_kind: str, seed: int) -> ProveJob:
    """A check as a run makes it."""
    return ProveJob(
        route=route.name,
        check=check,
        column=case.column.to_dict(),
        facts=facts.to_dict(),
        kv_lens=(case.kv_len, case.column.max_context),
        seed=seed,
        device=facts.device,
        arena_kind=arena_kind,
        pad_value=case.column.pad_value,
    )


def proven(worker: Worker, job: ProveJob) -> None:
    """Run a check.

    Raises:
        RuntimeError: it does not pass: its time would be another one.
    """
    row = prove(worker, job)
    if row.status not in (CheckStatus.PASSED, CheckStatus.NOT_APPLICABLE):
        raise RuntimeError(f"{job.route}: {row.check} came out {row.status.value}: {row.detail}")


def cost(
    route: Route, case: Case, facts: Facts, meter: Meter, workers: tuple[Worker, Worker], options: Options
) -> Cost:
    """Measure one route in one case."""
    device, kind, rng = facts.device, default_kind(facts.device), options.rng
    launch_us, requests = launches(route, case, device, meter, rng, options.seconds)
    setup_s = paired(
        (
            partial(seconds_of, partial(set_up, requests, kind, device)),
            partial(seconds_of, partial(set_up, requests, PLAIN, device)),
        ),
        rng,
        SETUPS,
    )
    seed = rng.getrandbits(31)
    jobs = [job_of(route, case, facts, CHECK, each, seed) for each in (kind, PLAIN)]
    runs = [partial(proven, worker, job) for worker, job in zip(workers, jobs, strict=True)]
    for run in runs:
        run()  # imports and first launches
    check_s = paired((partial(seconds_of, runs[0]), partial(seconds_of, runs[1])), rng, options.checks)
    names = registry.runs(case.column, device)
    start = time.perf_counter()
    for name in names:
        proven(workers[0], job_of(route, case, facts, name, kind, seed))
    every = time.perf_counter() - start
    nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype, _ in requests)
    return Cost(
        route=route.name,
        case=f"q_len {case.column.q_len} batch {case.column.batch_size}",
        kv_len=case.kv_len,
        launch_us=launch_us,
        setup_s=setup_s,
        operands=len(requests),
        mib=nbytes / 2**20,
        check_s=check_s,
        all_checks=len(names),
        all_checks_s=every,
    )


@dataclass(frozen=True)
class Options:
    """What was asked."""

    rng: random.Random
    seconds: float
    checks: int
    deadline: Deadline


@dataclass
class Found:
    """What has been measured, and why the rest has not."""

    costs: list[Cost] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    look: Look = field(default_factory=Look)

    def add(self, cost: Cost) -> None:
        """One more line, told at once."""
        self.costs.append(cost)
        pair = cost.launch_us
        print(
            f"{cost.route}, {cost.case}, kv {cost.kv_len}: guarded {pair.first:.1f} us, plain "
            f"{pair.second:.1f} us, ratio {pair.ratio:.3f}",
            flush=True,
        )

    def skip(self, line: str) -> None:
        """What is not measured, told at once."""
        self.skipped.append(line)
        print(f"not measured: {line}", flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    parser.add_argument("--routes", help="comma-separated; all that run here if left out")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the launches of each line")
    parser.add_argument("--checks", type=int, default=CHECKS, help="paired runs of a check")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the numbers, for a program")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for everything (600)")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    try:
        if asked.json:
            asked.json.open("a").close()
    except OSError as error:
        parser.error(f"--json {asked.json}: {error.strerror or error}")
    try:
        facts = collect(asked.device, threads=1)
    except (ValueError, HardwareError) as error:
        print(f"guard_cost: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 3
    known = routes(facts.device)
    names = asked.routes.split(",") if asked.routes else list(known)
    if unknown := [name for name in names if name not in known]:
        print(f"guard_cost: no route {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if facts.device == "cuda":
        cuda_allocator.install()
    options = Options(random.Random(asked.seed), asked.seconds, asked.checks, Deadline(asked.limit))
    found = Found()
    try:
        with ending("guard_cost", asked.limit), _on_stream(facts.device):
            measure([known[name] for name in names], facts, options, found)
    except Exception as error:
        # a device error ends this process' use of the device, not what was measured before it
        found.skipped.append(" ".join(f"ended by {type(error).__name__}: {error}".split())[:300])
    show(facts, found)
    if asked.json:
        under = found.look.cost()
        result = {
            "facts": facts.to_dict(),
            "costs": [asdict(each) for each in found.costs],
            "skipped": found.skipped,
            "sanitizer": found.look.line() if under is None else {**asdict(under), "factor": under.factor},
        }
        asked.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if found.costs else 1


@contextlib.contextmanager
def _on_stream(device: str) -> Iterator[None]:
    """A stream of our own: launches on the default one cannot be captured."""
    if device == "cpu":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield


def measure(chosen: list[Route], facts: Facts, options: Options, found: Found) -> None:
    """Every route in every case, case by case; what does not run, or has no time left, is named.

    Raises:
        RuntimeError: a device error: every later call of this process would fail.
        WorkerError: no child can be had.
    """
    deadline = options.deadline
    looks = facts.device == "cuda" and sanitizer.find() is not None
    meter = Meter(facts.device)
    with Worker(facts.device) as guarded, Worker(facts.device, guard_allocations=False) as plain:
        for case in cases(facts.device):
            for route in chosen:
                where = f"{route.name} in {case.column}"
                if reason := _absent(route, case.column, facts):
                    found.skip(f"{route.name}: {reason}")
                elif deadline.left <= (SANITIZER_S if looks else 0.0):
                    found.skip(f"{where}: no time left")
                else:
                    try:
                        found.add(cost(route, case, facts, meter, (guarded, plain), options))
                    except Exception as error:  # whatever a library raises: the other lines go on
                        if facts.device == "cuda" and is_device_error(error):
                            raise
                        found.skip(" ".join(f"{where}: {error}".split()))
    if not found.costs:
        found.look.said = "no route was measured"
        return
    limit = Deadline(min(sanitizer_cost.LIMIT_S, deadline.left))
    sanitizer_cost.measure(found.costs[0].route, facts.device, found.look, limit, options.rng)


def _absent(route: Route, column: Column, facts: Facts) -> str | None:
    """Why the route or its kernels are not to be had here."""
    available = getattr(route, "available", None)
    return route.supports(column, facts) or (available(column, facts) if callable(available) else None)


def show(facts: Facts, found: Found) -> None:
    """Print the tables."""
    costs = found.costs
    print(f"{facts.hardware['name']}, guarded: {default_kind(facts.device)}\n")
    print("| route | column | kv | guarded us | plain us | ratio | 80 % of them | rounds |")
    print("|---|---|---|---|---|---|---|---|")
    for each in costs:
        pair = each.launch_us
        print(
            f"| {each.route} | {each.case} | {each.kv_len} | {pair.first:.1f} | {pair.second:.1f} "
            f"| {pair.ratio:.3f} | {pair.middle[0]:.3f}..{pair.middle[1]:.3f} | {pair.rounds} |"
        )
    if costs:
        middle = statistics.median(each.launch_us.ratio for each in costs)
        print(f"\nmedian ratio of the lines: {middle:.3f}\n")
    print(
        "| route | column | operands | MiB | guarded set-up ms | plain ms "
        f"| {CHECK} guarded ms | plain ms | ratio | every check guarded |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for each in costs:
        setup, check = each.setup_s, each.check_s
        print(
            f"| {each.route} | {each.case} | {each.operands} | {each.mib:.1f} | {setup.first * 1e3:.2f} "
            f"| {setup.second * 1e3:.2f} | {check.first * 1e3:.0f} | {check.second * 1e3:.0f} "
            f"| {check.ratio:.2f} | {each.all_checks} in {each.all_checks_s:.2f} s |"
        )
    print(f"\nsanitizer: {found.look.line()}")
    for line in dict.fromkeys(found.skipped):
        print(f"not measured: {line}")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    if cuda_allocator.installed() is not None:
        os._exit(status)  # the allocator's callbacks outlive their globals
    sys.exit(status)
