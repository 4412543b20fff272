"""``autotune export``: write the table of a stored study again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import DEFAULT_DB, Db, EngineName, Gpu, Json, Out, SpaceFile


def command(
    gpu: Gpu,
    engine: EngineName = "generic",
    space: SpaceFile = None,
    db: Db = DEFAULT_DB,
    out: Out = Path("tuned_configs"),
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware", metavar="ID", help="Hardware id, where the database has several machines."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Apply the decision rule to stored rows and write the table. Needs no GPU, runs nothing."""
    from autotune.cli.context import all_routes, ask, target, writable
    from autotune.cli.output import print_json, stdout
    from autotune.report.summary import summary_json, summary_text
    from autotune.store.database import open_database
    from autotune.store.repository import Repository
    from autotune.tuner.publish import publish
    from autotune.tuner.run import open_run, study_digest
    from autotune.tuner.tuner import Progress

    asked = ask(gpu, engine, space)
    routes = all_routes()
    with open_database(db) as database:
        device = asked.grid.space.device
        found = {}
        for study in Repository(database).studies():
            facts = study.fingerprint.facts
            if study.engine != engine or not device.matches(facts):
                continue
            there = target(asked, facts)
            if study.space_digest == study_digest(there, routes):
                found[study.fingerprint.hardware_id + study.fingerprint.software_id] = there
        if hardware is not None:
            found = {key: there for key, there in found.items() if key.startswith(hardware)}
        if not found:
            raise CliError(
                f"{database.where}: no study of --gpu {asked.profile} --engine {engine} with this space and "
                f"these routes; autotune run makes one",
                Exit.FAILED,
            )
        if len(found) > 1:
            raise CliError(
                f"{database.where}: studies of several machines: --hardware takes one of "
                + ", ".join(f"{key[:12]} ({there.facts.hardware['name']})" for key, there in found.items()),
                Exit.USAGE,
            )
        writable(out)
        with open_run(database, next(iter(found.values())), routes, tuning=False) as run:
            settled = sum(run.judge.settled(item.cell) for item in run.cells)
            published = publish(run, out)
            progress = Progress(len(run.cells), settled, 0, False)
            if json:
                print_json(summary_json(run, progress, published))
            else:
                stdout.print(summary_text(run, progress, published))
    unsafe = any(cell.decision.reason.value == "no_safe_route" for cell in published.cells)
    return int(Exit.NO_SAFE_ROUTE if unsafe else Exit.DONE)
