"""``autotune run``: self-test, prove, time, decide, write the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.budget import seconds
from autotune.cli.exits import CliError, Exit
from autotune.cli.options import DEFAULT_DB, DEFAULT_OUT, Db, EngineName, Gpu, Json, Out, SpaceFile

if TYPE_CHECKING:
    from autotune.cli.context import Asked
    from autotune.tuner.deadline import Deadline

# A newcomer's first run must end by itself.
CPU_BUDGET = "60s"


def command(
    gpu: Gpu = None,
    engine: EngineName = "generic",
    space: SpaceFile = None,
    db: Db = DEFAULT_DB,
    out: Out = DEFAULT_OUT,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="End this call, self-test included, after 90s, 10m, 1h30m, ... (cpu: 60s if left out).",
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", min=1, help="Settle at most N cells in this call.")
    ] = None,
    json: Json = False,
) -> int:
    """Prove, time and decide on this machine; write the routing table.

    The same command goes on after a spent budget (exit 0, open cells are '?' in the table), Ctrl-C or a
    kill. It starts with the self-test, unless the database has that of this machine and code.
    """
    from autotune.cli.context import ask
    from autotune.tuner.deadline import Deadline

    asked = ask(gpu, engine, space)
    if budget is None and asked.grid.space.device.kind == "cpu":
        budget = CPU_BUDGET
    deadline = Deadline(None if budget is None else seconds(budget))
    return _run(asked, db, out, deadline, trials, json)


def _run(asked: Asked, db: str, out: Path, deadline: Deadline, trials: int | None, json: bool) -> int:
    from autotune.cli.context import here

    target = here(asked)  # a wrong machine is told before torch is imported

    from autotune.cli.context import all_routes, require_context, writable
    from autotune.cli.output import print_json, print_text, stderr
    from autotune.report.progress import ProgressView
    from autotune.report.summary import no_safe_route, summary_json, summary_text
    from autotune.store.database import open_database
    from autotune.tuner.publish import publish
    from autotune.tuner.run import ensure_selftest, open_run
    from autotune.tuner.tuner import Tuner
    from autotune.worker.worker import Worker

    routes = all_routes(target.device)
    require_context(asked, routes)
    writable(out)
    with (
        ProgressView(stderr) as view,
        open_database(db) as database,
        open_run(database, target, routes, tuning=True) as run,
        Worker(target.device) as worker,
    ):
        test = ensure_selftest(run, worker, view)
        if test is not None and not test.ok:
            missed = ", ".join(f"{row.control} ({row.check}: {row.got})" for row in test.failures)
            raise CliError(
                f"self-test failed, nothing was proven: {missed}; see autotune selftest",
                Exit.CONTROL_FAILED,
            )
        progress = Tuner(run, worker, view, deadline, trials).sweep()
        view.finished()
        published = publish(run, out)
        if json:
            print_json(summary_json(run, progress, published))
        else:
            print_text(summary_text(run, progress, published))
    return int(Exit.NO_SAFE_ROUTE if no_safe_route(published) else Exit.DONE)
