"""What a run did, for people and as JSON."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from math import exp, log
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotune.bench.shift import MIN_CELLS
from autotune.domain.decision import Reason
from autotune.report.grid import objective_text, table_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune.tuner.publish import Published
    from autotune.tuner.run import OpenedRun
    from autotune.tuner.tuner import Progress
    from autotune.tuner.undecided import Undecided


# Of the reasons why cells are unproven; --json has all.
REASONS_SHOWN = 3


def _cells(count: int) -> str:
    return f"{count} cell" if count == 1 else f"{count} cells"


def _phase(name: str, seconds: dict[str, float]) -> str:
    return f"{name} {seconds['actual_s']:.1f} s (predicted {seconds['predicted_s']:.1f} s)"


def _waiting(cells: Mapping[str, int], first: str) -> str:
    """How many of the cells that are not settled only wait for a second process; "" where none does.

    Args:
        cells: their number by the first objective under which they wait.
        first: the study's first objective.
    """
    if not cells:
        return ""
    total = sum(cells.values())
    others = [name for name in cells if name != first]
    under = ""
    if others:
        left = sum(cells[name] for name in others)
        under = f", {'' if left == total else f'{left} of them '}only under {' or '.join(others)}"
    return f"; {total} of the rest only {'waits' if total == 1 else 'wait'} for a second process{under}"


def no_safe_route(published: Published) -> int:
    """Cells in which not even the fallback is proven safe."""
    return sum(cell.decision.reason is Reason.NO_SAFE_ROUTE for cell in published.cells)


_DECIMALS = re.compile(r"\d+\.\d+")


def unproven(published: Published) -> list[dict[str, Any]]:
    """Why cells are open: each reason with its number of cells, the most frequent first.

    Reasons that differ in decimals alone, such as a bound's, are one; what differs is left out.
    """
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for cell in published.cells:
        if cell.decision.reason is Reason.UNPROVEN:
            alike[_DECIMALS.sub("", cell.decision.detail)].append(cell.decision.detail)
    found = [{"cells": len(details), "detail": _common(details)} for details in alike.values()]
    return sorted(found, key=lambda each: -each["cells"])


def _common(details: list[str]) -> str:
    """The text that they share, ``...`` for each decimal that differs."""
    numbers = zip(*(_DECIMALS.findall(detail) for detail in details), strict=True)
    kept = iter([same[0] if len(set(same)) == 1 else "..." for same in numbers])
    return _DECIMALS.sub(lambda _: next(kept), details[0])


def summary_json(
    run: OpenedRun, progress: Progress, published: Published, left: Undecided | None = None
) -> dict[str, Any]:
    """Counts, decisions, accusations, where the table is.

    Args:
        left: what an objective that was asked for leaves undecided.
    """
    cells = published.cells
    faster = [cell.decision.speedup for cell in cells if cell.decision.route and cell.decision.speedup]
    stored = run.repository.summary(run.study)
    return {
        "table": str(published.path),
        "digest": published.digest,
        "study": run.study.id,
        "cells": progress.cells,
        "settled": progress.settled,
        "settled_by_this_call": progress.now,
        "open_again": progress.reopened,
        "waiting_for_second_process": dict(progress.waiting),
        "out_of_budget": progress.out_of_budget,
        "devices_at_work": list(progress.devices),
        "seconds": {name: phase.to_dict() for name, phase in progress.phases.items()},
        "answers": dict(Counter(cell.decision.route or "fallback" for cell in cells)),
        "reasons": dict(Counter(cell.decision.reason.value for cell in cells)),
        "checks": dict(stored.checks),
        "kills": stored.kills,
        "retries": stored.retries,
        "geomean_speedup_where_routed": exp(sum(log(s) for s in faster) / len(faster)) if faster else None,
        "unproven": unproven(published),
        "objective": published.table.policy.objective,
        "layers": published.table.policy.layers,
        "hidden_prepare": published.table.policy.hidden_prepare,
        "undecided": None if left is None else {"stopped": left.stopped, "exhausted": left.exhausted},
        "unit": run.study.unit,
        "margin": published.table.policy.margin,
        "tau": published.table.policy.tau,
        "multiplicity": run.study.multiplicity,
        "unsafe": [
            {
                "route": item.route,
                "kind": item.kind,
                "cell": item.cell,
                "detail": item.detail,
                "repro": item.repro,
            }
            for item in published.table.unsafe
        ],
    }


def summary_text(
    run: OpenedRun, progress: Progress, published: Published, left: Undecided | None = None
) -> RenderableType:
    """The letter grid, then what it rests on; ``left`` as in :func:`summary_json`."""
    data = summary_json(run, progress, published, left)
    answers = ", ".join(f"{count} {name}" for name, count in sorted(data["answers"].items()))
    reasons = ", ".join(f"{count} {name}" for name, count in sorted(data["reasons"].items()))
    checks = ", ".join(f"{count} {name}" for name, count in sorted(data["checks"].items())) or "none"
    open_cells = data["cells"] - data["settled"]
    lines = [
        "",
        f"{data['settled']} of {data['cells']} cells settled, {data['settled_by_this_call']} by this call",
    ]
    if progress.reopened:
        lines[-1] += f"; {progress.reopened} of earlier calls' are open again"
    lines[-1] += _waiting(progress.waiting, run.study.objectives[0])
    if open_cells and data["out_of_budget"]:
        lines[-1] += "; budget spent, the same command goes on"
    elif open_cells:
        lines[-1] += "; autotune run with the same flags goes on"
    if len(progress.devices) > 1:
        together = ", ".join(progress.devices)
        lines.append(f"measured with {len(progress.devices)} devices of this host at work: {together}")
    if inside := sum(bool(cell.decision.route and cell.cell.column.interval) for cell in published.cells):
        # The table may have fewer letters for them: an interval names a route only where all in it agree.
        answers += f" ({inside} of the routed ones sampled inside batch intervals)"
    lines += [f"answers: {answers}", f"reasons: {reasons}", f"proof rows: {checks}"]
    if data["geomean_speedup_where_routed"]:
        lines.append(
            f"where routed: {data['geomean_speedup_where_routed']:.2f} x the fallback's speed "
            f"(geometric mean; margin {data['margin']:g}, {data['multiplicity']} possible claims)"
        )
    lines.append(
        "shift between processes (tau): "
        + (
            f"not measured; it takes {MIN_CELLS} cells that were timed in a second process"
            if data["tau"] is None
            else f"{data['tau']:.2%}, the margin is at least 3 of it"
        )
    )
    if without := no_safe_route(published):
        detail = next(
            cell.decision.detail for cell in published.cells if cell.decision.reason is Reason.NO_SAFE_ROUTE
        )
        lines.append(f"NO SAFE ROUTE in {without} cells, first: {detail}")
    if left is not None:
        lines.append(
            f"decided by {objective_text(published.table.policy)}: {_cells(left.cells)} undecided, "
            f"{left.stopped} because rounds ran only until {' and '.join(run.judge.objectives.names)} (the "
            f"model's layers, nothing hidden) was resolved, {left.exhausted} after the last round"
        )
    for each in data["unproven"][:REASONS_SHOWN]:
        lines.append(f"{_cells(each['cells'])} unproven: {each['detail']}")
    if more := data["unproven"][REASONS_SHOWN:]:
        lines.append(f"{_cells(sum(each['cells'] for each in more))} unproven for other reasons")
    if data["seconds"]:
        lines.append("time of this call: " + ", ".join(_phase(*each) for each in data["seconds"].items()))
    lines.append(f"table: {data['table']}")
    return Group(table_text(published.table), Text("\n".join(lines)))
