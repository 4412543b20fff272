"""Do two independent studies of one space say the same?

    python benchmarks/agreement.py SOURCE1 SOURCE2 [--engine sglang] [--space FILE] [--near 0.02]

Both are databases (``.db``, ``.db.xz``, a URL). Each is decided again under the engine, from its stored rows.
Needs no GPU. A cell counts as decided where its answer is final: no open proof, no open test, no claim that
waits for a second process (its letter is ``?`` until then). It is *near* where a deployable candidate's
median ratio lies within ``--near`` of 1 + margin in either study, or two winners lie as near to each other:
there a letter may differ without either study being wrong. The margin is the one in force, 3 tau where that
is more than the study's floor.

The loss of a table is the time of its choice over that of the other study's own choice, by the *other*
study's times, less 1: nothing judges itself. It is below 0 where the foreign choice was quicker.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from autotune.bench.eprocess import State
from autotune.bench.objective import graph
from autotune.domain.verdict import Status
from benchmarks.recorded import JudgedCell, JudgedStudy, RecordedError, ended, judged, opened, table

if TYPE_CHECKING:
    from autotune.bench.objective import Objective

NEAR = 0.02


@dataclass(frozen=True)
class Loss:
    """What a foreign table costs: the mean over cells, and the worst cell."""

    cells: int
    mean: float
    worst: float
    where: str


@dataclass(frozen=True)
class Agreement:
    """Two studies side by side.

    Attributes:
        common: cells of which both have proofs or rounds.
        waiting: those that wait for a second process in study 1, and in study 2.
        decided: those of them that are decided in both.
        equal: decided ones with the same choice.
        clear, clear_equal: the same, over cells that are not near.
        differing: decided, clear, and not the same: (cell, choice 1, choice 2).
        opposite: (cell, route, status 1, status 2) where one study proved safe what the other proved unsafe.
        proofs: routes of common cells that both studies have a final verdict about.
        losses: table 1 by the times of study 2, and the other way round.
    """

    common: int
    waiting: tuple[int, int]
    decided: int
    equal: int
    clear: int
    clear_equal: int
    differing: tuple[tuple[str, str, str], ...]
    opposite: tuple[tuple[str, str, str, str], ...]
    proofs: int
    losses: tuple[Loss | None, Loss | None]


def near(item: JudgedCell, margin: float, within: float) -> bool:
    """Whether a small shift of a ratio could change the cell's letter."""
    deployable = [s for s in item.outcome.standings if s.candidate.deployable and s.speedup is not None]
    for standing in deployable:
        assert standing.speedup is not None
        if abs(standing.speedup / (1.0 + margin) - 1.0) <= within:
            return True
    winners = sorted((s.speedup or 0.0 for s in deployable if s.state is State.CLAIM), reverse=True)
    return len(winners) > 1 and winners[0] / winners[1] - 1.0 <= within


def time_of(item: JudgedCell, route: str, objective: Objective) -> float | None:
    """Median microseconds of a route in a cell's stored rounds; None if it has none."""
    times = [objective(r, route) for r in item.evidence.rounds if route in r.run_us and not r.dropped]
    return median(times) if times else None


def loss(
    choices: dict[str, str], times: dict[str, JudgedCell], objectives: dict[str, Objective]
) -> Loss | None:
    """Of ``choices`` by cell id, against the own ones of a study, by the times of that study."""
    lost: list[tuple[float, str]] = []
    for cell_id, choice in choices.items():
        item, objective = times[cell_id], objectives[cell_id]
        mine, theirs = time_of(item, choice, objective), time_of(item, item.choice, objective)
        if mine and theirs:
            lost.append((mine / theirs - 1.0, f"{item.cell}: {choice} for {item.choice}"))
    if not lost:
        return None
    worst = max(lost)
    return Loss(len(lost), fmean(value for value, _ in lost), worst[0], worst[1] if worst[0] > 0 else "")


def compare(one: JudgedStudy, two: JudgedStudy, within: float = NEAR) -> Agreement:
    """Set two studies against each other, cell by cell."""
    first = {item.cell.id: item for item in one.cells}
    second = {item.cell.id: item for item in two.cells}
    common = [cell_id for cell_id in first if cell_id in second]
    decided = [cell_id for cell_id in common if first[cell_id].final and second[cell_id].final]
    margins = [study.judge.test_of(study.judge.objectives.first).margin for study in (one, two)]
    clear = [
        cell_id
        for cell_id in decided
        if not near(first[cell_id], margins[0], within) and not near(second[cell_id], margins[1], within)
    ]

    def equal(cell_id: str) -> bool:
        return first[cell_id].choice == second[cell_id].choice

    opposite: list[tuple[str, str, str, str]] = []
    proofs = 0
    proven = {Status.SAFE, Status.UNSAFE}
    for cell_id in common:
        a, b = _verdicts(first[cell_id]), _verdicts(second[cell_id])
        for route in a.keys() & b.keys():
            if {a[route], b[route]} <= proven:
                proofs += 1
                if a[route] is not b[route]:
                    opposite.append((str(first[cell_id].cell), route, a[route].value, b[route].value))
    objectives = {cell_id: _objective(one, first[cell_id]) for cell_id in common}
    return Agreement(
        common=len(common),
        waiting=(sum(first[c].waits for c in common), sum(second[c].waits for c in common)),
        decided=len(decided),
        equal=sum(map(equal, decided)),
        clear=len(clear),
        clear_equal=sum(map(equal, clear)),
        differing=tuple(
            (str(first[c].cell), first[c].choice, second[c].choice) for c in clear if not equal(c)
        ),
        opposite=tuple(sorted(opposite)),
        proofs=proofs,
        losses=(
            loss({c: first[c].choice for c in decided}, second, objectives),
            loss({c: second[c].choice for c in decided}, first, objectives),
        ),
    )


def _verdicts(item: JudgedCell) -> dict[str, Status]:
    evidence = item.evidence
    return {
        evidence.fallback: evidence.fallback_verdict.status,
        **{candidate.name: candidate.verdict.status for candidate in evidence.candidates},
    }


def _objective(study: JudgedStudy, item: JudgedCell) -> Objective:
    return study.judge.objectives.of(item.cell.column).get(study.judge.objectives.first, graph)


def report(found: Agreement, within: float) -> str:
    """The tables."""

    def share(part: int, whole: int) -> str:
        return f"{part} of {whole} ({part / whole:.1%})" if whole else "none"

    rows: list[list[object]] = [
        ["cells in both", found.common],
        ["waiting for a second process, of study 1 / 2", " / ".join(map(str, found.waiting))],
        ["decided in both", found.decided],
        ["raw agreement: same letter", share(found.equal, found.decided)],
        [f"same letter, no estimate within {within:.0%}", share(found.clear_equal, found.clear)],
        ["opposite proofs (safe, unsafe)", share(len(found.opposite), found.proofs)],
    ]
    text = table(("", ""), rows) + "\n"
    rows = []
    for name, each in zip(
        ("table 1, times of study 2", "table 2, times of study 1"), found.losses, strict=True
    ):
        if each is not None:
            rows.append([name, each.cells, f"{each.mean:+.3%}", f"{each.worst:+.2%}", each.where or "-"])
    text += table(("gain lost", "cells", "mean", "worst", "where"), rows)
    for cell, one, two in found.differing:
        text += f"differs, clearly: {cell}: {one} / {two}\n"
    for cell, route, one, two in found.opposite:
        text += f"opposite proofs: {cell}: {route} is {one} / {two}\n"
    return text


def main(arguments: list[str]) -> int:
    """Print the comparison. Exit 1 if a source cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs=2, metavar="SOURCE")
    parser.add_argument("--engine", default="generic")
    parser.add_argument("--space", type=Path, help="where the studies' space is not the shipped one")
    parser.add_argument("--near", type=float, default=NEAR, metavar="SHARE")
    options = parser.parse_args(arguments)

    def run() -> None:
        one, two = options.sources
        with opened(one) as first, opened(two) as second:
            a = judged(first, one, options.engine, space=options.space)
            b = judged(second, two, options.engine, space=options.space)
            found = compare(a, b, options.near)
            if not found.common:
                raise RecordedError(f"{one}: shares no cell with {two}")
            hardware = {each.study.fingerprint.hardware_id for each in (a, b)}
            software = {each.study.fingerprint.software_id for each in (a, b)}
            if len(hardware) > 1 or len(software) > 1:
                print("The studies are of different machines or software: they need not agree.\n")
            print(report(found, options.near), end="")

    return ended(run, "agreement")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
