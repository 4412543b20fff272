"""``autotune selftest``: show every check the faults that it is there for."""

from __future__ import annotations

from typing import Annotated

import typer

from autotune.cli.exits import Exit
from autotune.cli.options import Gpu, Json


def command(
    gpu: Gpu = "cpu",
    only: Annotated[
        str | None, typer.Option("--only", metavar="CHECK", help="Run this check's controls alone.")
    ] = None,
    skip_check: Annotated[
        list[str],
        typer.Option(
            "--skip-check",
            metavar="CHECK",
            help="Do not run this check: its controls stay undetected. Repeatable.",
        ),
    ] = [],  # noqa: B006 - the parser makes a new one
    json: Json = False,
) -> int:
    """Run the controls on this device: planted faults that must be detected, clean kernels that must pass.

    Exit 4 if a planted fault goes undetected or a clean kernel is accused.
    """
    from autotune.cli.context import ask, here
    from autotune.cli.output import note, print_json, print_text, stderr
    from autotune.prebuild.verify import require_selftest, unnamed, verify
    from autotune.report.progress import ProgressView
    from autotune.report.selftest import selftest_text
    from autotune.tuner.selftest import chosen, run_selftest
    from autotune.worker.worker import Worker

    target = here(ask(gpu, "generic", None))
    skip = frozenset(skip_check)
    controls = chosen(target.device, only, skip)
    verify(target.facts, (), {})
    if said := unnamed(target.facts):
        note(said)
    if any(control.needs == "flashinfer" for control in controls):
        require_selftest(target.facts)
    with ProgressView(stderr) as view, Worker(target.device) as worker:
        view.selftest_started(len(controls))
        test = run_selftest(
            worker,
            target.device,
            only=only,
            skip=skip,
            facts=target.facts,
            on_result=lambda result: view.selftest_row(result.to_dict()),
        )
        view.selftest_done(test.ok)
    if json:
        print_json([result.to_dict() for result in test.results])
    else:
        print_text(selftest_text(test))
    return int(Exit.DONE if test.ok else Exit.CONTROL_FAILED)
