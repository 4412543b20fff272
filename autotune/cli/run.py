"""``autotune run``: self-test, prove, time, decide, write the table."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.budget import seconds
from autotune.cli.exits import CliError, Exit
from autotune.cli.filters import Filters
from autotune.cli.gathered import gathered
from autotune.cli.options import (
    DEFAULT_DB,
    DEFAULT_OUT,
    Budget,
    Db,
    EngineName,
    Gpu,
    Json,
    Out,
    Routes,
    Search,
    SearchName,
    SpaceFile,
    TrafficFile,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from autotune.cli.context import Asked
    from autotune.hardware.devices import Device
    from autotune.report.progress import ProgressView
    from autotune.routes.base import Route
    from autotune.space.traffic import Weights
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.lanes import Lane
    from autotune.tuner.pilot import Pilot
    from autotune.tuner.target import Target
    from autotune.worker.worker import Worker

# A newcomer's first run must end by itself.
CPU_BUDGET = "100s"

# On the CPU a second child would only take the first one's core. On a GPU a check is mostly Python; six
# children fill neither the device nor the cores of a serving host.
PROVERS = {"cpu": 1, "cuda": 6}
# Device memory that proofs may use together: each child keeps about 1 GiB for its context besides.
PROVING_SHARE = 0.6


@gathered
def command(
    gpu: Gpu = None,
    engine: EngineName = "generic",
    space: SpaceFile = None,
    filters: Filters = Filters(),  # noqa: B008 - frozen
    db: Db = DEFAULT_DB,
    out: Out = DEFAULT_OUT,
    budget: Budget = None,
    strategy: Search = SearchName.EXHAUSTIVE,
    traffic: TrafficFile = None,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", min=1, help="Settle at most N cells in this call.")
    ] = None,
    provers: Annotated[
        int | None,
        typer.Option(
            "--provers",
            metavar="N",
            min=1,
            help="Children of a device that prove at once (cpu: 1, GPU: 6 if left out); it times alone.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="N,...",
            help="GPUs that work at once, all alike, as CUDA counts them here; or all. On the CPU: cores. "
            "The first GPU if left out.",
        ),
    ] = None,
    only: Routes = None,
    sanitizer: Annotated[
        bool,
        typer.Option(
            "--sanitizer/--no-sanitizer",
            help="GPU: look at unsafe memory verdicts once with compute-sanitizer, where it is installed.",
        ),
    ] = True,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="FILE",
            help="Answer from a recorded study (its database, or what scripts/thin_evidence.py wrote) "
            "instead of a device; --budget counts recorded time. Writes DIR/replay.json, no table; not with "
            "--db, --provers or --devices.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Prove, time and decide on this machine; write the routing table.

    The same command goes on after a spent budget (exit 0, open cells are '?' in the table), Ctrl-C or a
    kill. It starts with the self-test, unless the database has that of this machine and code.
    """
    from autotune.cli.context import ask
    from autotune.cli.search import require_search, weights
    from autotune.tuner.deadline import Deadline

    require_search(strategy, budget, traffic)
    asked = ask(gpu, engine, space, filters)
    if replay is not None:
        from autotune.cli.replay import run_replay

        if provers is not None or devices is not None or db != DEFAULT_DB:
            raise CliError(
                "--replay runs no child and keeps no database: leave --provers, --devices and --db out",
                Exit.USAGE,
            )
        return run_replay(
            asked,
            replay,
            out,
            budget_s=None if budget is None else seconds(budget),
            trials=trials,
            only=only,
            as_json=json,
            adaptive=strategy is SearchName.ADAPTIVE,
            weights=None if traffic is None else weights(asked.grid, traffic).by_cell,
        )
    if budget is None and asked.grid.space.device.kind == "cpu":
        budget = CPU_BUDGET
    deadline = Deadline(None if budget is None else seconds(budget))
    adaptive = strategy is SearchName.ADAPTIVE
    weighed = None if traffic is None else weights(asked.grid, traffic)
    return _run(asked, db, out, deadline, trials, provers, devices, only, sanitizer, json, adaptive, weighed)


def _run(
    asked: Asked,
    db: str,
    out: Path,
    deadline: Deadline,
    trials: int | None,
    provers: int | None,
    devices: str | None,
    only: str | None,
    sanitizer: bool,
    json: bool,
    adaptive: bool,
    weighed: Weights | None,
) -> int:
    target, chosen = _where(asked, devices)  # a wrong machine is told before torch is imported

    from autotune.cli.context import all_routes, require_context, require_controls, writable
    from autotune.cli.output import note, stderr
    from autotune.cli.tables import report, write
    from autotune.prebuild.verify import unnamed, verify
    from autotune.report.progress import ProgressView
    from autotune.store.database import open_database
    from autotune.tuner.adaptive import Adaptive
    from autotune.tuner.lineup import left_out
    from autotune.tuner.pace import KEPT, Pace
    from autotune.tuner.run import ensure_selftest, open_run
    from autotune.tuner.triage import triage
    from autotune.tuner.tuner import Tuner

    routes = all_routes(target.device, only)
    require_context(asked, routes)
    verify(target.facts, target.grid.columns, routes)
    if said := unnamed(target.facts):
        note(said)
    writable(out)
    with (
        ProgressView(stderr) as view,
        open_database(db) as database,
        _lanes(target, chosen, provers, note) as lanes,
        open_run(
            database, target, routes, tuning=True, pilot=lambda: _pilot(lanes[0].timer, target, routes, view)
        ) as run,
    ):
        for line in left_out(run.judge.lineup(column) for column in target.grid.columns).values():
            note(line)
        crew, timer = lanes[0].crew, lanes[0].timer
        require_controls(ensure_selftest(run, crew.workers[0], view))
        pace = Pace.resumed(run.queue.noted(KEPT))
        by_cell = None if weighed is None else weighed.by_cell
        strategy = Adaptive(run, deadline, pace, len(crew.workers), by_cell) if adaptive else None
        progress = Tuner(
            run,
            crew,
            timer,
            view,
            deadline,
            trials,
            strategy,
            lanes=lanes,
            scout=lanes[0].scout,
            pace=pace,
        ).sweep()
        view.finished()
        # the table of this call stands before what can take minutes; it is written again with what was found
        first = lanes[0].name
        if sanitizer and (said := triage(run, deadline, first=lambda: write(run, out), device=first)):
            note(said)
        return report(run, progress, out, json)


def _where(asked: Asked, devices: str | None) -> tuple[Target, tuple[Device, ...]]:
    """The target here, and the devices that ``--devices`` names; none where it is left out."""
    from autotune.cli.context import here, target
    from autotune.cli.output import note

    if devices is None:
        return here(asked), ()
    from autotune.hardware.devices import BadDevicesError, select

    try:
        chosen = select(devices, asked.grid.space.device, note)
    except BadDevicesError as error:
        raise CliError(str(error), Exit.USAGE) from error
    return target(asked, chosen[0].facts), chosen


@contextlib.contextmanager
def _lanes(
    target: Target, devices: Sequence[Device], provers: int | None, warn: Callable[[str], None]
) -> Iterator[list[Lane]]:
    """A lane for each device, the first of which answers; one for the first device if none is named."""
    from autotune.hardware.devices import Device
    from autotune.hardware.memory import GIB
    from autotune.hardware.neighbours import neighbours
    from autotune.tuner.crew import Crew
    from autotune.tuner.lanes import Lane, leading
    from autotune.worker.worker import Worker

    for line in neighbours(devices or (Device(0, target.facts),)):
        warn(line)
    count = provers or PROVERS[target.facts.device]
    memory = None if target.memory_gib is None else int(target.memory_gib * GIB * PROVING_SHARE)
    with contextlib.ExitStack() as stack:
        lanes = []
        for name, presence in [(each.name, each.presence) for each in devices] or [(target.device, None)]:
            # what is timed runs as it is served: on the library's own allocations
            timer = stack.enter_context(Worker(name, guard_allocations=False))
            crew = Crew([stack.enter_context(Worker(name)) for _ in range(count)], memory)
            scout = stack.enter_context(Worker(name, guard_allocations=False))  # no child until it looks
            lanes.append(Lane(name, crew, timer, presence, scout))
        yield leading(lanes, target.device, warn) if devices else lanes


def _pilot(timer: Worker, target: Target, routes: Mapping[str, Route], view: ProgressView) -> Pilot:
    from autotune.tuner.pilot import run_pilot

    found = run_pilot(timer, target, routes)
    view.pilot_done(found)
    return found
