"""Looks for wrong kernels where libraries' own tests do not go.

    python benchmarks/corners.py --out corners.jsonl [--seconds 240] [--quick] [--routes a,b] [--only NAME]
        [--provers 6] [--memory 100]
    python benchmarks/corners.py --list-columns > columns.json   # for autotune prebuild --columns
    python benchmarks/corners.py --list-modules [--arch 9.0]     # needs FlashInfer, no GPU

Pages of 16, 32 and 128 tokens, head_dim 64, q_len 6 to 16, odd GQA groups, long KV at q_len 1, fp8 around
q_len x group = 32 (where XQA changes its kernel on SM90), sliding windows, sinks, odd batches under graph
replay. Each column goes to every route that supports it, with all checks (``--quick``: the ones that find
most), in order, until a check fails or the time is up. One row per column and route, printed and written to
``--out`` as a JSON line as soon as it is known, so that a run that is killed keeps them. A route whose module
is not prebuilt here is ``not here`` and the module is named. Exit 0 whatever is found, 1 if no child can be
had, 2 for a wrong flag, 3 if the device does not answer.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from autotune.arena.factory import default_kind
from autotune.checks import oracle, registry
from autotune.checks.launch import arithmetic_of
from autotune.domain.cell import Column
from autotune.domain.dtypes import BITS, PROFILES, Dtype, DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import KvLayout, Shape
from autotune.domain.verdict import CheckResult, CheckStatus, Status, conclude
from autotune.hardware.collect import collect
from autotune.hardware.errors import HardwareError
from autotune.hardware.memory import GIB, operand_bytes
from autotune.routes import registry as routes
from autotune.tuner.crew import Crew, Task
from autotune.tuner.deadline import Deadline
from autotune.tuner.prover import repro_command, seed_of
from autotune.worker.base import WorkerError
from autotune.worker.jobs import ProveJob
from autotune.worker.worker import Worker
from benchmarks.ending import Pulse, ending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.routes.base import Route

# What a first look costs least for: a wrong number, a wrong page, a wrong length, a padded row, a replay.
QUICK = ("reference", "position_coded", "ragged_lengths", "padded_rows", "table_garbage", "graph_replay")
PROVERS = {"cpu": 1, "cuda": 6}
# Of the device's memory for proofs that run side by side; the rest is contexts and workspaces.
PROVING_SHARE = 0.8
WORKSPACE_BYTES = 512 * 2**20
STEP_TIMEOUT_S = 30.0
NOT_HERE = "not here"
MOST_DETAIL = 110


@dataclass(frozen=True)
class Corner:
    """A column that upstream tests leave out, and why it is looked at."""

    name: str
    why: str
    column: Column


BF16, FP8, FP16 = PROFILES["bf16"], PROFILES["fp8"], DTypes("fp16", "fp16", "fp16")
CONTEXT, LONG = 4096, 131072
SWITCH = "XQA changes its kernel past q_len x group = 32"


def _at(
    heads: tuple[int, int, int],
    page: int,
    dtypes: DTypes,
    q_len: int,
    batch: int = 3,
    context: int = CONTEXT,
    *,
    window: int = -1,
    sinks: bool = False,
    layout: KvLayout = KvLayout.FUSED_NHD,
    pad_value: int = 1,
) -> Column:
    shape = Shape(*heads, page, kv_layout=layout.value, window_left=window, sinks=sinks)
    return Column(shape, dtypes, q_len, batch, context, pad_value=pad_value)


# In order of interest. Batches are odd and small: rows do not fill tiles, and a proof stays quick.
CORNERS = (
    Corner("fp8-at-32", f"{SWITCH}: the last below", _at((8, 1, 128), 64, FP8, 4)),
    Corner("fp8-past-32", f"{SWITCH}: the first above", _at((8, 1, 128), 64, FP8, 5)),
    Corner("group5", "GQA group 5 divides no tile", _at((5, 1, 128), 64, BF16, 4)),
    Corner("group7", "GQA group 7 (28/4 heads)", _at((7, 1, 128), 64, BF16, 4)),
    Corner("page16", "16 tokens a page", _at((8, 1, 128), 16, BF16, 4)),
    Corner("page128", "128 tokens a page", _at((8, 1, 128), 128, BF16, 4)),
    Corner("dim64", "head_dim 64", _at((8, 1, 64), 64, BF16, 4)),
    Corner("window127", "a window that cuts a page", _at((8, 1, 128), 64, BF16, 4, window=127)),
    Corner("sinks", "gpt-oss: sinks, head_dim 64", _at((8, 1, 64), 64, BF16, 4, sinks=True)),
    Corner("q8", "q_len 8, past FlashInfer's tests", _at((8, 1, 128), 64, BF16, 8)),
    Corner("long-q1-fp8", "one request, long KV, the most splits", _at((8, 1, 128), 64, FP8, 1, 1, LONG)),
    Corner("long-q1", "one request, long KV, the most splits", _at((8, 1, 128), 64, BF16, 1, 1, LONG)),
    Corner("q6-fp8", "q_len 6, past FlashInfer's tests", _at((8, 1, 128), 64, FP8, 6)),
    Corner("q16", "q_len 16: half of a mask word", _at((8, 1, 128), 64, BF16, 16)),
    Corner("group16-fp8-at-32", f"{SWITCH}: group 16, q_len 2", _at((32, 2, 256), 64, FP8, 2)),
    Corner("group16-fp8-past-32", f"{SWITCH}: group 16, q_len 3", _at((32, 2, 256), 64, FP8, 3)),
    Corner("batch67", "XQA splits otherwise from batch 67 on 132 SMs", _at((8, 1, 128), 64, BF16, 2, 67)),
    Corner("batch33-fp8", "an odd batch under graph replay", _at((8, 1, 128), 64, FP8, 3, 33)),
    Corner("pad0", "padded rows of no tokens", _at((8, 1, 128), 64, BF16, 4, pad_value=0)),
    Corner("pad0-fp8", "padded rows of no tokens", _at((8, 1, 128), 64, FP8, 5, pad_value=0)),
    Corner("page16-q1-fp8", "16 tokens a page, Hopper fp8 kernel", _at((8, 1, 128), 16, FP8, 1)),
    Corner("page32-fp8-past-32", "32 tokens a page, Hopper fp8 kernel", _at((8, 1, 128), 32, FP8, 5)),
    Corner("page32", "32 tokens a page", _at((8, 1, 128), 32, BF16, 4)),
    Corner("page128-fp8", "128 tokens a page, Hopper fp8 kernel", _at((8, 1, 128), 128, FP8, 5)),
    Corner("group6-fp8-below-32", f"{SWITCH}: 30, group 6", _at((6, 1, 128), 64, FP8, 5)),
    Corner("group6-fp8-past-32", f"{SWITCH}: 36, group 6", _at((6, 1, 128), 64, FP8, 6)),
    Corner("group12", "GQA group 12 (96/8 heads)", _at((12, 1, 128), 64, BF16, 4)),
    Corner("group12-q1", "GQA group 12 at q_len 1", _at((12, 1, 128), 64, BF16, 1)),
    Corner("group5-q1-fp8", "group 5, Hopper fp8 kernel", _at((5, 1, 128), 64, FP8, 1)),
    Corner("group7-fp8-past-32", f"{SWITCH}: 35, group 7", _at((7, 1, 128), 64, FP8, 5)),
    Corner("q12", "q_len 12", _at((8, 1, 128), 64, BF16, 12)),
    Corner("q16-fp8", "q_len 16, Hopper fp8 kernel", _at((8, 1, 128), 64, FP8, 16)),
    Corner("q7-dim256", "q_len 7 at head_dim 256", _at((8, 1, 256), 64, BF16, 7)),
    Corner("long-q1-dim256", "long KV at head_dim 256", _at((32, 2, 256), 64, BF16, 1, 1, LONG)),
    Corner("window15-page16", "a window of one page", _at((8, 1, 128), 16, BF16, 4, window=15)),
    Corner("window2", "a window smaller than q_len", _at((8, 1, 128), 64, BF16, 4, window=2)),
    Corner(
        "window127-fp8", "a window: the generic kernel above 32", _at((8, 1, 128), 64, FP8, 5, window=127)
    ),
    Corner(
        "window127-q1", "a window at q_len 1, long KV", _at((8, 1, 128), 64, BF16, 1, 2, 32768, window=127)
    ),
    Corner("sinks-window", "gpt-oss's other layers", _at((8, 1, 64), 64, BF16, 4, window=127, sinks=True)),
    Corner("sinks-fp8", "sinks: the generic kernel above 32", _at((8, 1, 64), 64, FP8, 5, sinks=True)),
    Corner("dim64-q1-fp8", "head_dim 64, Hopper fp8 kernel", _at((8, 1, 64), 64, FP8, 1)),
    Corner("group1", "as many KV heads as query heads", _at((8, 8, 128), 64, BF16, 4)),
    Corner("group4-hnd", "several KV heads, HND", _at((32, 8, 128), 64, BF16, 4, layout=KvLayout.FUSED_HND)),
    Corner(
        "interleaved", "vLLM's pool, HND", _at((16, 2, 128), 16, BF16, 4, layout=KvLayout.INTERLEAVED_HND)
    ),
    Corner("fp16", "fp16 throughout", _at((8, 1, 128), 64, FP16, 4)),
)


@dataclass
class Found:
    """What came of one corner and route.

    Attributes:
        verdict: a status's word, or ``not here``.
        bound: what its errors are held to.
    """

    corner: Corner
    route: str
    verdict: str
    kind: str = ""
    check: str = ""
    detail: str = ""
    worst_error: float | None = None
    bound: float | None = None
    limits: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    checks: int = 0
    launches: int = 0
    repro: str = ""

    def to_dict(self) -> dict[str, object]:
        """JSON-ready values."""
        data = {**vars(self), "corner": self.corner.name, "why": self.corner.why}
        return {**data, "column": self.corner.column.to_dict()}

    def line(self) -> str:
        """One row of the table."""
        error = (
            "" if self.worst_error is None or not self.bound else f"{self.worst_error:.3g}/{self.bound:.3g}"
        )
        said = "; ".join([*self.requires, *self.limits]) or self.detail
        said = said if len(said) <= MOST_DETAIL else said[: MOST_DETAIL - 3] + "..."
        column = f"{self.corner.name}: {self.corner.column}"
        return (
            f"| {column} | {self.route} | {self.verdict} | {self.kind} | {self.check} | {error} "
            f"| {said.replace('|', '/')} |"
        )


@dataclass
class Proving:
    """A corner and route whose checks are running."""

    corner: Corner
    route: Route
    jobs: tuple[ProveJob, ...]
    rows: list[CheckResult] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """No further row will come."""
        failed = bool(self.rows) and self.rows[-1].status is CheckStatus.FAILED
        return failed or len(self.rows) == len(self.jobs)

    def found(self, facts: Facts) -> Found:
        """The row, from the checks that were run."""
        column = self.corner.column
        verdict = conclude(self.rows, [job.check for job in self.jobs])
        telling = next((job for job in self.jobs if job.check == verdict.check), self.jobs[0])
        return Found(
            self.corner,
            self.route.name,
            verdict.status.value,
            verdict.kind.value if verdict.kind else "",
            verdict.check,
            verdict.reason,
            verdict.worst_error,
            oracle.bound(column, arithmetic_of(self.route, column, facts)),
            verdict.limits,
            verdict.requires,
            verdict.checks,
            verdict.launches,
            "" if verdict.status is Status.SAFE else repro_command(telling),
        )


class Report:
    """Prints rows and writes them, each as soon as it is known."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream
        self.counts: Counter[str] = Counter()
        self.corners: set[str] = set()
        self.unsupported = 0
        self.unsafe: list[Found] = []
        print("| corner | route | verdict | kind | check | worst error/bound | says |", flush=True)
        print("|---|---|---|---|---|---|---|", flush=True)

    def add(self, found: Found) -> None:
        """One row."""
        self.counts[found.verdict] += 1
        if found.verdict not in (NOT_HERE, Status.UNPROVEN.value):
            self.corners.add(found.corner.name)
        if found.verdict == Status.UNSAFE.value:
            self.unsafe.append(found)
        print(found.line(), flush=True)
        if self._stream is not None:
            self._stream.write(json.dumps(found.to_dict()) + "\n")
            self._stream.flush()

    def summary(self, seconds: float) -> None:
        """What is told last."""
        for found in self.unsafe:
            print(f"\nunsafe: {found.route} in {found.corner.name}: {found.kind}: {found.detail}")
            print(f"  {found.repro}")
        said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.counts.items()))
        print(f"\n{self.unsupported} pairs of a corner and a route that does not support it are left out")
        rows = sum(self.counts.values())
        print(f"{len(self.corners)} corners tried, {rows} rows in {seconds:.0f} s: {said or 'none'}")


def missing_sizes(route: Route, column: Column, facts: Facts) -> str | None:
    """Why fmha-v2's module does not serve ``column``, as its manifest says; None if it does, or may.

    One module's name stands for whatever head sizes it was built with; a call for another would fail as if
    the kernel were at fault.
    """
    from autotune.prebuild import manifest as manifests
    from autotune.prebuild.install import aot_folder
    from autotune.routes.flashinfer import installed
    from autotune.routes.flashinfer.library import LibraryError, library

    package = installed.package(facts) if route.name == "fmha-v2" else None
    folder = None if package is None else aot_folder(package)
    manifest = None if folder is None else manifests.read(folder)
    if manifest is None:
        return None
    try:
        names = library(str(facts.hardware["compute_capability"])).modules(route.name, column)
    except LibraryError:
        return None
    for name in names:
        sizes = manifest.modules[name].head_dims if name in manifest.modules else ()
        if sizes and column.shape.head_dim not in sizes:
            return f"module {name} was built for head sizes {', '.join(map(str, sizes))} only"
    return None


def absent(route: Route, column: Column, facts: Facts) -> str | None:
    """Why the kernels of ``route`` for ``column`` are not here; None if they are, or may be."""
    available = getattr(route, "available", None)
    reason = available(column, facts) if callable(available) else None
    return reason or missing_sizes(route, column, facts)


def proving(corner: Corner, route: Route, facts: Facts, checks: Sequence[str], seed: int) -> Proving:
    """The jobs of one corner and route."""
    column = corner.column
    jobs = tuple(
        ProveJob(
            route=route.name,
            check=check,
            column=column.to_dict(),
            facts=facts.to_dict(),
            kv_lens=tuple(sorted({max(column.q_len, column.max_context // 8), column.max_context})),
            seed=seed_of(seed, column.id, route.name, check),
            device=facts.device,
            arena_kind=default_kind(facts.device),
            pad_value=column.pad_value,
        )
        for check in registry.runs(column, facts.device)
        if check in checks
    )
    return Proving(corner, route, jobs)


def task_of(found: Proving) -> Task:
    """What a crew runs; its memory as the tuner reckons it: the far pool of ``scattered_pages``, or rows."""
    column = found.corner.column
    far = 2 * 2**31 * BITS[Dtype(column.dtypes.kv)] // 8
    nbytes = max(far, 3 * operand_bytes(column, column.max_context)) + WORKSPACE_BYTES
    return Task(found.route, column, tuple((column, job) for job in found.jobs), nbytes)


def hunt(
    corners: Sequence[Corner],
    chosen: Sequence[Route],
    facts: Facts,
    report: Report,
    *,
    checks: Sequence[str],
    seconds: float,
    provers: int,
    seed: int,
    memory_gib: float | None = None,
) -> None:
    """Every corner with every route that supports it, within ``seconds``; what is left undone is reported so,
    also where a signal ends it.

    Args:
        memory_gib: of the device, for all proofs together; None: a share of all it has.

    Raises:
        WorkerError: no child can be had.
    """
    deadline = Deadline(seconds)
    work: dict[tuple[str, str], Proving] = {}
    for corner in corners:
        for route in chosen:
            if route.supports(corner.column, facts):
                report.unsupported += 1
            elif reason := absent(route, corner.column, facts):
                report.add(Found(corner, route.name, NOT_HERE, detail=reason))
            else:
                work[corner.name, route.name] = proving(corner, route, facts, checks, seed)
    tasks = {key: task_of(found) for key, found in work.items()}
    keys = {id(task): key for key, task in tasks.items()}
    memory = facts.hardware.get("memory_gib") if facts.device == "cuda" else None
    whole = float(memory) * PROVING_SHARE if isinstance(memory, (int, float)) else None
    share = None if whole is None else int((memory_gib or whole) * GIB)
    pulse, count = Pulse("corners", time.monotonic()), 0
    try:
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(Worker(facts.device, step_timeout_s=STEP_TIMEOUT_S))
                for _ in range(provers)
            ]
            rows = Crew(workers, share).run(list(tasks.values()), lambda: deadline.passed)
            with contextlib.closing(rows):
                for row in rows:
                    count += 1
                    key = keys[id(row.task)]
                    work[key].rows.append(row.result)
                    if work[key].done:
                        report.add(work.pop(key).found(facts))
                    pulse.beat(time.monotonic(), f"{count} checks, {len(work)} of {len(keys)} pairs to go")
    finally:
        for left in work.values():
            report.add(left.found(facts))


def named(names: str | None, known: Sequence[str], what: str) -> list[str]:
    """``names`` split at commas; all that are known if None.

    Raises:
        ValueError: one is not known.
    """
    if names is None:
        return list(known)
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"no {what} is called {unknown[0]!r}; there are {', '.join(known)}")
    return chosen


def list_modules(corners: Sequence[Corner], chosen: Sequence[str], arch: str) -> None:
    """Print what the installed FlashInfer loads for ``corners``, with the routes that load it.

    Raises:
        PrebuildError: FlashInfer cannot be imported.
    """
    from autotune.prebuild.build import modules_of

    columns = [corner.column for corner in corners]
    facts = Facts("cuda", {"compute_capability": arch}, {})
    with tempfile.TemporaryDirectory(prefix="autotune-corners-") as work:
        found = modules_of(columns, facts, routes=chosen, work=Path(work))
    for name, by in found.items():
        print(f"{name}  [{', '.join(by)}]")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, appended as rows come")
    parser.add_argument("--seconds", type=float, default=240.0, help="no check begins after them")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--routes", metavar="NAME,...", help="all of the device's if left out")
    parser.add_argument("--only", metavar="NAME,...", help="only these corners")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    parser.add_argument("--provers", type=int, help="children at once (cpu: 1, GPU: 6)")
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="GPU: for all proofs together (80 %% of the device's)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list-columns", action="store_true", help="print the columns as JSON, run nothing")
    parser.add_argument("--list-modules", action="store_true", help="name the modules, run nothing")
    parser.add_argument("--arch", default="9.0", help="compute capability that --list-modules is about")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Hunt, or list."""
    options = arguments(given)
    by_name = {corner.name: corner for corner in CORNERS}
    try:
        corners = [by_name[name] for name in named(options.only, list(by_name), "corner")]
        if options.list_columns:
            print(json.dumps([corner.column.to_dict() for corner in corners], indent=1))
            return 0
        if options.list_modules:
            from autotune.prebuild.errors import PrebuildError

            cuda = routes.routes("cuda")
            try:
                list_modules(corners, named(options.routes, list(cuda), "route"), options.arch)
            except PrebuildError as error:
                print(f"corners: {error}", file=sys.stderr)
                return 1
            return 0
        facts = collect(options.device, threads=1)
        known = routes.routes(facts.device)
        chosen = [known[name] for name in named(options.routes, list(known), "route")]
    except ValueError as error:
        print(f"corners: {error}", file=sys.stderr)
        return 2
    except HardwareError as error:
        print(f"corners: {error}", file=sys.stderr)
        return 3
    began, lost = time.monotonic(), False
    with contextlib.ExitStack() as stack:
        # beginning anew would lose what an earlier run found
        stream = stack.enter_context(options.out.open("a")) if options.out else None
        report = Report(stream)
        try:
            with ending("corners", options.seconds):
                hunt(
                    corners,
                    chosen,
                    facts,
                    report,
                    checks=QUICK if options.quick else registry.names(),
                    seconds=options.seconds,
                    provers=options.provers or PROVERS[facts.device],
                    seed=options.seed,
                    memory_gib=options.memory,
                )
        except WorkerError as error:
            lost = True
            print(f"corners: {error}", file=sys.stderr)
    report.summary(time.monotonic() - began)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
