"""``autotune export``: write the table of a stored study again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.filters import Filters
from autotune.cli.gathered import gathered
from autotune.cli.options import (
    DEFAULT_DB,
    DEFAULT_OUT,
    Db,
    EngineName,
    Gpu,
    Json,
    Out,
    Routes,
    SpaceFile,
)

if TYPE_CHECKING:
    from autotune.cli.context import Asked
    from autotune.routes.base import Route
    from autotune.store.database import Database
    from autotune.tuner.target import Target


@gathered
def command(
    gpu: Gpu = None,
    engine: EngineName = "generic",
    space: SpaceFile = None,
    filters: Filters = Filters(),  # noqa: B008 - frozen
    db: Db = DEFAULT_DB,
    out: Out = DEFAULT_OUT,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", metavar="ID", help="First digits of a machine's id, where there are several."
        ),
    ] = None,
    only: Routes = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective", metavar="NAME", help="Decide by this one of the study's; its first if left out."
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            metavar="N",
            min=1,
            help="With --objective step: layers that share one preparation; the model's if left out.",
        ),
    ] = None,
    hidden_prepare: Annotated[
        float | None,
        typer.Option(
            "--hidden-prepare",
            metavar="SHARE",
            help="With --objective step: share of prepare that the engine hides, 0 (if left out) to 1.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Apply the decision rule to stored rows and write the table again.

    Runs nothing and needs no GPU. Choose the objective, the layers and the hidden share by the engine, before
    you look at what each gives: the bound on false claims holds for one table (docs/statistics.md).
    """
    from autotune.cli.context import ask, require_database, writable
    from autotune.cli.tables import report
    from autotune.store.database import open_database
    from autotune.tuner.objectives import STEP
    from autotune.tuner.run import open_run
    from autotune.tuner.tally import Tally
    from autotune.tuner.tuner import Progress

    asked = ask(gpu, engine, space, filters)
    declared = asked.grid.space.objectives
    if objective is not None and objective not in declared:
        raise CliError(f"--objective {objective}: the space declares {', '.join(declared)}", Exit.USAGE)
    if objective != STEP and (layers is not None or hidden_prepare is not None):
        raise CliError(
            "--layers and --hidden-prepare weigh the objective step: add --objective step", Exit.USAGE
        )
    if hidden_prepare is not None and not 0.0 <= hidden_prepare <= 1.0:
        raise CliError(f"--hidden-prepare {hidden_prepare}: a share from 0 to 1", Exit.USAGE)
    require_database(db)
    with open_database(db) as database:
        there, routes = _stored(database, asked, hardware, only)
        writable(out)
        with open_run(database, there, routes, tuning=False) as run:
            tally = Tally.of(run, run.repository.decisions(run.study))
            run.weigh(layers, hidden_prepare or 0.0)
            progress = Progress(len(run.cells), len(tally.settled), 0, False, waiting=tally.by_objective)
            return report(run, progress, out, json, objective)


def _stored(
    database: Database, asked: Asked, hardware: str | None, only: str | None
) -> tuple[Target, dict[str, Route]]:
    """The one machine of which the database has a study of these cells, engine and routes."""
    from autotune.cli.context import all_routes, target
    from autotune.store.repository import Repository
    from autotune.tuner.run import study_digest

    device = asked.grid.space.device
    routes = all_routes(device.kind, only)
    found: dict[str, Target] = {}
    for study in Repository(database).studies():
        facts = study.fingerprint.facts
        if not device.matches(facts):
            continue
        there = target(asked, facts)
        key = study.fingerprint.hardware_id + study.fingerprint.software_id
        if study.space_digest == study_digest(there, routes) and key.startswith(hardware or ""):
            found[key] = there
    if not found:
        raise CliError(
            f"{database.where}: no study of --gpu {asked.profile} with the cells of --engine "
            f"{asked.grid.engine.name} and these routes; autotune run makes one, and --models, --batch, ... "
            "must be as they were there"
        )
    if len(found) > 1:
        machines = ", ".join(f"{key[:12]} ({there.facts.hardware['name']})" for key, there in found.items())
        raise CliError(
            f"{database.where}: several machines' studies; choose with --hardware: {machines}", Exit.USAGE
        )
    return next(iter(found.values())), routes
