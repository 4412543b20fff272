"""Writes the tables of a run and says what is in them: what ``run`` and ``export`` end with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.cli.exits import Exit

if TYPE_CHECKING:
    from pathlib import Path

    from autotune.table.model import RoutingTable
    from autotune.tuner.publish import Published
    from autotune.tuner.run import OpenedRun
    from autotune.tuner.tuner import Progress


def write(run: OpenedRun, out: Path, objective: str | None = None) -> list[tuple[OpenedRun, Published]]:
    """One table an engine into ``out``; what each run is under its engine, and what was written."""
    from autotune.cli.output import note
    from autotune.tuner.publish import publish, table_path

    run.learn()
    views = [run.under(judge) for judge in run.judges]
    paths = [table_path(view, out) for view in views]
    before = [_standing(path) for path in paths]
    written = [(view, publish(view, out, objective)) for view in views]
    for path, old, (_, published) in zip(paths, before, written, strict=True):
        if old is None:
            continue
        was, now = old.policy.objective, published.table.policy.objective
        if was != now:
            note(f"{path}: the table that was there was decided by {was}, this one is by {now}")
        if gone := _gone(old, published.table):
            said = f"the table that was there had {gone} cells that this one has not"
            note(f"{path}: {said}; export, with the flags that it had, makes it again")
    return written


def _standing(path: Path) -> RoutingTable | None:
    """The table that is about to be replaced; None where there is none, or none that can be read."""
    from autotune.table.errors import TableError
    from autotune.table.load import load_table

    try:
        return load_table(path) if path.exists() else None
    except TableError:
        return None


def _gone(old: RoutingTable, new: RoutingTable) -> int:
    from autotune.table.diff import diff_tables

    changes = diff_tables(old, new)
    return sum(change.after is None and change.kv_high is not None for change in changes)


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
