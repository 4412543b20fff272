"""What a verification found, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.report.grid import STYLES, ratio
from autotune.tuner.verify import Finding, Outcome, meaning

if TYPE_CHECKING:
    from autotune.table.model import RoutingTable
    from autotune.tuner.answered import Answered

OUTCOME_STYLES = {
    Outcome.SAME: "green",
    Outcome.CHANGED: "yellow",
    Outcome.UNDECIDED: "dim",
    Outcome.UNSAFE: "bold red",
    Outcome.OPEN: "dim",
}


@dataclass(frozen=True)
class Verification:
    """One call of ``autotune verify``.

    Attributes:
        answered: every cell of the table that could have been drawn.
        findings: one a drawn cell, in the table's order.
        routes: that were proven and timed, fallbacks included.
        multiplicity, unit: of the test of this verification's own study.
        database: where its rows are kept; None: nowhere.
    """

    file: Path
    table: RoutingTable
    answered: tuple[Answered, ...]
    findings: tuple[Finding, ...]
    routes: tuple[str, ...]
    seed: int
    multiplicity: int
    unit: str
    out_of_budget: bool
    database: str | None = None

    def count(self, outcome: Outcome) -> int:
        """Cells with this outcome."""
        return sum(finding.outcome is outcome for finding in self.findings)


def verification_json(found: Verification) -> dict[str, Any]:
    """Everything, every drawn cell included."""
    table = found.table
    return {
        "table": str(found.file),
        "digest": table.digest,
        "seed": found.seed,
        "answered": len(found.answered),
        "sampled": len(found.findings),
        "routes": list(found.routes),
        "objective": table.policy.objective,
        "margin": table.policy.margin,
        "multiplicity": found.multiplicity,
        "unit": found.unit,
        "out_of_budget": found.out_of_budget,
        "database": found.database,
        "outcomes": {outcome.value: found.count(outcome) for outcome in Outcome},
        "letters": [_letter_json(found, letter) for letter in _letters(found)],
        "cells": [_cell_json(finding) for finding in found.findings],
    }


def _letter_json(found: Verification, letter: str) -> dict[str, Any]:
    outcomes = Counter(each.outcome for each in found.findings if each.place.letter == letter)
    return {
        "letter": letter,
        "meaning": found.table.legend[letter],
        "answered": sum(place.letter == letter for place in found.answered),
        "sampled": sum(outcomes.values()),
        **{outcome.value: outcomes[outcome] for outcome in Outcome},
    }


def _cell_json(finding: Finding) -> dict[str, Any]:
    place = finding.place
    return {
        "cell": place.cell.to_dict(),
        "name": str(place.cell),
        "models": list(place.entry.models),
        "outcome": finding.outcome.value,
        "before": meaning(place.answer),
        "after": meaning(finding.after),
        "detail": finding.detail,
        "speedup_low": {"before": place.speedup_low, "after": finding.speedup_low},
        "vs_stock": {"before": place.vs_stock, "after": finding.vs_stock},
        "speedup": finding.speedup,
        "checks": {"before": place.checks, "after": finding.checks},
        "repro": list(finding.repro),
    }


def verification_text(found: Verification) -> RenderableType:
    """The sample by letter, then each cell that is not the same, then what it amounts to."""
    table = found.table
    parts: list[RenderableType] = [
        Text(
            f"{found.file}: {len(found.findings)} of {len(found.answered)} answered cells, seed "
            f"{found.seed}; routes {', '.join(found.routes)}"
        ),
        Text(
            f"objective {table.policy.objective}, margin {table.policy.margin:g}, {found.multiplicity} "
            f"possible claims, one unit a {found.unit}",
            style="dim",
        ),
        "",
        _by_letter(found),
    ]
    other = [finding for finding in found.findings if finding.outcome is not Outcome.SAME]
    if other:
        parts += ["", _cells(other)]
    for finding in other:
        if finding.outcome is Outcome.UNSAFE:
            parts += [Text(f"again: {line}", style="red") for line in finding.repro]
    return Group(*parts, "", Text(_verdict(found)))


def _letters(found: Verification) -> list[str]:
    return sorted({place.letter for place in found.answered}, key=lambda letter: (letter in STYLES, letter))


def _by_letter(found: Verification) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("letter")
    grid.add_column("means")
    for name in ("in table", "sampled", *(outcome.value for outcome in Outcome)):
        grid.add_column(name, justify="right")
    for letter in _letters(found):
        row = _letter_json(found, letter)
        counts = [
            Text(str(row[outcome.value]), OUTCOME_STYLES[outcome] if row[outcome.value] else "dim")
            for outcome in Outcome
        ]
        grid.add_row(letter, row["meaning"], str(row["answered"]), str(row["sampled"]), *counts)
    return grid


def _cells(findings: list[Finding]) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("outcome", "cell", "before", "after", "low", "vs stock", "detail"):
        grid.add_column(name)
    for finding in findings:
        place = finding.place
        grid.add_row(
            Text(finding.outcome.value, OUTCOME_STYLES[finding.outcome]),
            Text(str(place.cell)),
            Text(meaning(place.answer)),
            Text(meaning(finding.after)),
            Text(f"{ratio(place.speedup_low)} -> {ratio(finding.speedup_low)}"),
            Text(f"{ratio(place.vs_stock)} -> {ratio(finding.vs_stock)}"),
            Text(" ".join(finding.detail.split())),
        )
    return grid


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _verdict(found: Verification) -> str:
    counts = {outcome: found.count(outcome) for outcome in Outcome}
    lines = []
    if counts[Outcome.UNSAFE]:
        lines.append(
            f"UNSAFE in {counts[Outcome.UNSAFE]} cell{_s(counts[Outcome.UNSAFE])}: withdraw the route with "
            "autotune quarantine, then run again"
        )
    if counts[Outcome.CHANGED]:
        lines.append(
            f"{counts[Outcome.CHANGED]} letter{_s(counts[Outcome.CHANGED])} would change: speed alone is no "
            "error, and only autotune run makes another table"
        )
    if counts[Outcome.UNDECIDED]:
        lines.append(
            f"{counts[Outcome.UNDECIDED]} undecided after the last round: nothing contradicts the letter"
        )
    if counts[Outcome.OPEN]:
        why = "the budget is spent" if found.out_of_budget else "see their details"
        lines.append(f"{counts[Outcome.OPEN]} open: {why}")
    lines.append(f"{counts[Outcome.SAME]} of {len(found.findings)} the same")
    return "\n".join(lines)
