"""``autotune verify``: prove and time a sample of a table's cells again, on the machine that it names."""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.budget import seconds
from autotune.cli.exits import CliError, Exit
from autotune.cli.options import Json, Routes

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts
    from autotune.report.verification import Verification
    from autotune.routes.base import Route
    from autotune.space.engine import Engine
    from autotune.store.database import Database
    from autotune.table.model import RoutingTable
    from autotune.tuner.answered import Answered
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.target import Target

DEFAULT_SAMPLE = "5%"


def command(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A routing table of this machine.")],
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample", metavar="N|P%", help="So many cells, or such a share of the answered ones (5%)."
        ),
    ] = None,
    all_cells: Annotated[bool, typer.Option("--all", help="Every answered cell.")] = False,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, help="Of the sample and of the operands: another one, other cells."),
    ] = 0,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TIME", help="End after 90s, 10m, ...; the rest is 'open'."),
    ] = None,
    db: Annotated[
        str | None,
        typer.Option(
            "--db",
            metavar="URL",
            help="Keep the evidence and go on from it; a temporary file if left out. Never the table's own.",
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option("--engine", metavar="FILE", help="The engine profile, where it is not a shipped one."),
    ] = None,
    only: Routes = None,
    json: Json = False,
) -> int:
    """Prove and time a sample of the table's cells again, and say which letters would change.

    The sample takes as many cells of each letter as of any other. It is a study of its own in a database of
    its own; nothing of the table or of its study is touched. Exit 1 if a route that the table holds to be
    safe is now unsafe, 3 if this machine is not the table's. A changed speed is reported, and is exit 0.
    """
    from autotune.cli.output import print_json, print_text
    from autotune.report.verification import verification_json, verification_text
    from autotune.table.load import load_table
    from autotune.tuner.answered import answered, draw
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.verify import Outcome

    if sample is not None and all_cells:
        raise CliError("--sample and --all: give one of them", Exit.USAGE)
    deadline = Deadline(None if budget is None else seconds(budget))
    loaded = load_table(table)
    places = answered(loaded)
    count = len(places) if all_cells else _count(sample or DEFAULT_SAMPLE, len(places))
    if not places:
        raise CliError(f"{table}: answers no cell from evidence, so there is nothing to verify", Exit.USAGE)
    drawn = draw(places, count, seed)
    facts = _here(loaded, table)
    profile = _engine(loaded, table, engine)
    found = _verify(loaded, table, places, drawn, facts, profile, seed, deadline, db, only)
    if json:
        print_json(verification_json(found))
    else:
        print_text(verification_text(found))
    unsafe = any(each.outcome is Outcome.UNSAFE for each in found.findings)
    return int(Exit.FAILED if unsafe else Exit.DONE)


def _count(text: str, answered: int) -> int:
    """Cells that ``--sample`` asks for, at least one.

    Raises:
        CliError: neither a number of cells nor a share (exit 2).
    """
    share = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%", text.strip())
    if share and 0 < float(share[1]) <= 100:
        return max(1, math.ceil(answered * float(share[1]) / 100))
    if re.fullmatch(r"[1-9]\d{0,8}", text.strip()):
        return int(text)
    raise CliError(f"--sample {text!r}: write a number of cells or a share, such as 40 or 5%", Exit.USAGE)


def _here(table: RoutingTable, file: Path) -> Facts:
    """This machine's facts, as the tuner measures on it.

    Raises:
        CliError: a fact that the table is bound to differs (exit 3).
    """
    from autotune.domain.fingerprint import mismatches
    from autotune.hardware.collect import collect, has_nvidia_device
    from autotune.hardware.match import PINNED_THREADS, present

    device = table.facts.device
    if device == "cuda" and not has_nvidia_device():  # torch takes seconds to find out
        wrong = [f"hardware.name: table {table.facts.hardware['name']!r}, here {present()}"]
    else:
        facts = collect(device, threads=PINNED_THREADS)
        wrong = mismatches(table.facts, facts)
    if wrong:
        raise CliError(
            f"{file}: this machine is not the table's, so nothing here would verify it: {'; '.join(wrong)}",
            Exit.WRONG_MACHINE,
        )
    return facts


def _engine(table: RoutingTable, file: Path, given: Path | None) -> Engine:
    """The profile that the table was made under."""
    from autotune.space.engine import load_engine
    from autotune.space.library import engine_names

    name = table.policy.engine
    if given is None and name not in engine_names():
        raise CliError(
            f"{file}: engine {name} is no shipped profile; give its file: --engine FILE", Exit.USAGE
        )
    profile = load_engine(given if given is not None else name)
    if profile.name != name:
        raise CliError(f"--engine {given}: is {profile.name!r}, and the table is of {name!r}", Exit.USAGE)
    return profile


def _routes(table: RoutingTable, file: Path, target: Target, only: str | None) -> dict[str, Route]:
    """The table's routes, or those of ``--routes``.

    Raises:
        CliError: one is not installed here, or ``--routes`` leaves out one that the table names (exit 2).
    """
    from autotune.cli.context import all_routes
    from autotune.tuner.verify import route_names

    found = all_routes(target.facts.device, only)
    if missing := [name for name in table.families if name not in found]:
        why = "--routes leaves it out" if only is not None else "its package is not installed here"
        raise CliError(f"{file}: speaks of the route {missing[0]}; {why}", Exit.USAGE)
    if only is not None:
        return found
    wanted = route_names(table, target.engine.deployable(target.arch))
    return {name: route for name, route in found.items() if name in wanted}


def _target(
    table: RoutingTable, file: Path, drawn: tuple[Answered, ...], facts: Facts, engine: Engine, seed: int
) -> Target:
    from autotune.arena.factory import default_kind
    from autotune.table.errors import TableError
    from autotune.tuner.regrid import regrid
    from autotune.tuner.target import Target

    try:
        grid = regrid(table, drawn, engine, file)
    except TableError as error:
        raise error.within(str(file)) from error
    return Target(grid, facts, facts.device, default_kind(facts.device), seed)


def _verify(
    table: RoutingTable,
    file: Path,
    places: tuple[Answered, ...],
    drawn: tuple[Answered, ...],
    facts: Facts,
    engine: Engine,
    seed: int,
    deadline: Deadline,
    db: str | None,
    only: str | None,
) -> Verification:
    target = _target(table, file, drawn, facts, engine, seed)
    routes = _routes(table, file, target, only)

    from autotune.cli.context import require_controls
    from autotune.cli.output import note, stderr
    from autotune.cli.run import PROVERS, PROVING_SHARE
    from autotune.hardware.devices import Device
    from autotune.hardware.memory import GIB
    from autotune.hardware.neighbours import neighbours
    from autotune.prebuild.verify import unnamed
    from autotune.prebuild.verify import verify as verify_modules
    from autotune.report.progress import ProgressView
    from autotune.report.verification import Verification
    from autotune.tuner.crew import Crew
    from autotune.tuner.pilot import run_pilot
    from autotune.tuner.run import ensure_selftest, open_run
    from autotune.tuner.tuner import Tuner
    from autotune.tuner.verify import IncomparableError, findings, require_same_fallbacks, strict
    from autotune.worker.worker import Worker

    try:
        require_same_fallbacks(drawn, routes, target)
    except IncomparableError as error:
        raise CliError(f"{file}: {error}", Exit.USAGE) from error
    verify_modules(facts, target.grid.columns, routes)
    if said := unnamed(target.facts):
        note(said)
    for line in neighbours((Device(0, facts),)):
        note(line)
    with (
        ProgressView(stderr) as view,
        _database(db, table) as database,
        Worker(target.device, guard_allocations=False) as timer,
        open_run(
            database,
            target,
            routes,
            tuning=True,
            pilot=lambda: run_pilot(timer, target, routes),
            margin=table.policy.margin,
        ) as run,
        contextlib.ExitStack() as stack,
    ):
        run.weigh(table.policy.layers, table.policy.hidden_prepare or 0.0)
        strict(run)
        crew = Crew(
            [stack.enter_context(Worker(target.device)) for _ in range(PROVERS[facts.device])],
            None if target.memory_gib is None else int(target.memory_gib * GIB * PROVING_SHARE),
        )
        require_controls(ensure_selftest(run, crew.workers[0], view))
        # the margin is the table's, which tau has raised already: one of this study's would move it once more
        progress = Tuner(run, crew, timer, view, deadline, None, again=False).sweep()
        view.finished()
        return Verification(
            file=file,
            table=table,
            answered=places,
            findings=findings(run, drawn),
            routes=tuple(routes),
            seed=seed,
            multiplicity=run.test.multiplicity,
            unit=run.test.unit.value,
            out_of_budget=progress.out_of_budget,
            database=db,
        )


@contextlib.contextmanager
def _database(url: str | None, table: RoutingTable) -> Iterator[Database]:
    """The database of ``--db``, or one that goes when the command ends.

    Raises:
        CliError: it holds studies of ``autotune run``, whose proofs would be read, not repeated (exit 2).
    """
    from autotune.store.database import open_database
    from autotune.store.repository import Repository
    from autotune.tuner.regrid import NAME

    with contextlib.ExitStack() as stack:
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-verify-"))
            url = f"sqlite:///{folder}/verify.db"
        database = stack.enter_context(open_database(url))
        if foreign := [study for study in Repository(database).studies() if study.space_name != NAME]:
            whose = "the table's own study" if foreign[0].id == table.generated.study else "a run's study"
            raise CliError(
                f"--db {url}: holds {whose}, whose proofs would be read and not repeated; name another file",
                Exit.USAGE,
            )
        yield database
