"""Writes the tables of a run and says what is in them: what ``run`` and ``export`` end with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.cli.exits import Exit

if TYPE_CHECKING:
    from pathlib import Path

    from autotune.tuner.publish import Published
    from autotune.tuner.run import OpenedRun
    from autotune.tuner.tuner import Progress


def write(run: OpenedRun, out: Path, objective: str | None = None) -> list[tuple[OpenedRun, Published]]:
    """One table an engine into ``out``; what each run is under its engine, and what was written."""
    from autotune.tuner.publish import publish

    run.learn()
    views = [run.under(judge) for judge in run.judges]
    return [(view, publish(view, out, objective)) for view in views]


def report(run: OpenedRun, progress: Progress, out: Path, json: bool, objective: str | None = None) -> int:
    """One table an engine into ``out``; the summary on stdout, with several engines a list of them.

    Args:
        objective: decide by this one of the study's; its first if None.

    Returns:
        The exit code: 5 if a cell of any table has no safe route.
    """
    from autotune.cli.output import print_json, print_text
    from autotune.report.summary import no_safe_route, summary_json, summary_text
    from autotune.tuner.undecided import undecided

    written = [
        (view, published, None if objective is None else undecided(view, objective))
        for view, published in write(run, out, objective)
    ]
    if json:
        found = [summary_json(view, progress, published, left) for view, published, left in written]
        print_json(found[0] if len(found) == 1 else found)
    else:
        for view, published, left in written:
            print_text(summary_text(view, progress, published, left))
    lost = any(no_safe_route(published) for _, published, _ in written)
    return int(Exit.NO_SAFE_ROUTE if lost else Exit.DONE)
