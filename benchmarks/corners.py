"""Looks for wrong kernels where libraries' own tests do not go.

    python benchmarks/corners.py --out corners.jsonl [--seconds 240] [--quick] [--routes a,b] [--only NAME]
        [--provers 6] [--memory 100]
    python benchmarks/corners.py --list-columns > columns.json   # for autotune prebuild --columns
    python benchmarks/corners.py --list-modules [--arch 9.0]     # needs FlashInfer, no GPU

Pages of 16, 32 and 128 tokens, head_dim 64, q_len 6 to 16, odd GQA groups, long KV at q_len 1, fp8 around
q_len x group = 32 (where XQA changes its kernel on SM90), sliding windows, sinks, odd batches under graph
replay. Each column goes to every route that supports it, with all checks (``--quick``: the ones that find
most), in order, until a check fails or the time is up; all routes of a column before the next column. One row
per column and route, printed and written to ``--out`` as a JSON line as soon as it is known, so that a run
that is killed keeps them. A route whose module is not prebuilt here is ``not here`` and the module is named.

With an ``--out`` that is there already a run goes on: rows that say something of this machine, these checks
and these adapters stand (``--quick`` or not; versions count), what was cut off or not here is looked at
again. The last row of a column and route counts. Exit 0 whatever is found, 1 if no child can be had, 2 for a
wrong flag or an ``--out`` that cannot be written, 3 if the device does not answer.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from autotune.arena.factory import default_kind
from autotune.checks import oracle, registry
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import arithmetic_of
from autotune.domain.cell import Column
from autotune.domain.dtypes import BITS, Dtype
from autotune.domain.fingerprint import Facts
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
from benchmarks.corner_list import CORNERS, Corner
from benchmarks.corner_rows import NOT_HERE, Found, Report, earlier
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
            elif report.stands(corner, route.name):
                continue
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


def machine(facts: Facts) -> str:
    """What a row is about: the device, and what its kernels come from."""
    software = (f"{name} {value}" for name, value in sorted(facts.software.items()) if value is not None)
    return " / ".join((str(facts.hardware.get("name")), *software))


def _appending(path: Path) -> IO[str]:
    """``path`` to write rows behind those it has; a line that a kill cut off is ended first."""
    stream = path.open("a+")
    stream.seek(0)
    text = stream.read()  # ends where the appending begins
    if text and not text.endswith("\n"):
        stream.write("\n")
    return stream


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
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON lines, appended as rows come; goes on where there are some",
    )
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
    checks = QUICK if options.quick else registry.names()
    # of the same checks and adapters only: a stricter one may find what an older one passed
    marks = {
        "proof": " ".join(f"{name}:{VERSIONS[name]}" for name in checks),
        "adapters": " ".join(f"{name}:{adapter.version}" for name, adapter in sorted(known.items())),
        "on": machine(facts),
    }
    began, lost = time.monotonic(), False
    with contextlib.ExitStack() as stack:
        try:
            before = earlier(options.out, corners, marks) if options.out and options.out.exists() else []
            stream = stack.enter_context(_appending(options.out)) if options.out else None
        except OSError as error:
            print(f"corners: --out {options.out}: {error.strerror or error}", file=sys.stderr)
            return 2
        report = Report(stream, marks, [found for found in before if found.route in {r.name for r in chosen}])
        try:
            with ending("corners", options.seconds):
                hunt(
                    corners,
                    chosen,
                    facts,
                    report,
                    checks=checks,
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
