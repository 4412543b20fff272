"""How much slower than the best route is what a rule chooses? The table's choice beside simpler rules.

    python benchmarks/regret.py SOURCE [--engine sglang] [--oracle ROUNDS.jsonl] [--objective step]

``SOURCE`` is a study's database (``.db``, ``.db.xz``, a URL), decided again under the engine; needs no GPU. A
rule's regret in a cell is the median time of its choice over that of the best deployable route, less 1.

* With ``--oracle`` the times are medians over all rounds of ``record_rounds.py``, in the cells that it
  recorded: other rounds in other processes than those that any rule saw.
* Without, the study's own rounds are halved (those of even and of odd number): a rule chooses by one half,
  the other one judges, then the other way round, and both count. The best of noisy medians is a little too
  good for everyone, so no rule's regret is 0.

Rules: ``table``, as it is exported: it saw all rounds of the study, the judging half too where there is no
oracle. ``table, final``: the same, without cells that a budget left open. ``table, half``: its rule on one
half at N = 1, since half of the rounds cannot reach the study's N. ``smallest median``: of each route's first
10 rounds in one half, without a margin, as tuners do that keep the fastest candidate. ``nearest bucket``: the
same, measured at every second batch size and KV row only and taken over by the cells between (nearest in log2
batch and log2 KV). ``nearest bucket, q_len 1``: measured at q_len 1 only, as where q_len is no axis.
``always ...`` and ``stock``: fixed. Only routes count that the engine can deploy; a cell where a rule has no
timed choice is left out for it.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from autotune.tuner.decide import decide
from benchmarks.recorded import JudgedCell, JudgedStudy, RecordedError, ended, judged, opened, read, table

if TYPE_CHECKING:
    from autotune.bench.objective import Objective
    from autotune.bench.record import Round
    from autotune.domain.cell import Cell

FIRST = 10  # rounds that a tuner without a test looks at
Times = Mapping[str, float]
DECODE = ("xqa-decode", "trtllm-gen-decode", "torch-splitkv")
FA2 = "fa2"


@dataclass(frozen=True)
class Half:
    """A cell with the rounds that rules may see and the times that judge them.

    Attributes:
        seen: rounds to choose by.
        truth: median microseconds by deployable route, from others.
    """

    item: JudgedCell
    seen: tuple[Round, ...]
    truth: Times
    objective: Objective
    deployable: frozenset[str]

    @property
    def cell(self) -> Cell:
        """The cell."""
        return self.item.cell

    def quickest(self) -> str | None:
        """The route of the smallest median in the first rounds seen; None where fewer than two have one."""
        first = medians(self.seen, self.objective, self.deployable, FIRST)
        return min(first, key=lambda name: (first[name], name)) if len(first) > 1 else None


def medians(
    rounds: Sequence[Round], objective: Objective, routes: frozenset[str], first: int | None = None
) -> dict[str, float]:
    """Median time by route, of the rounds that count, or of the ``first`` ones that each route has."""
    times: dict[str, list[float]] = defaultdict(list)
    for round_ in rounds:
        for name in round_.run_us:
            if name in routes and not round_.dropped:
                times[name].append(objective(round_, name))
    return {name: median(each[:first]) for name, each in times.items()}


def deployable(item: JudgedCell) -> frozenset[str]:
    """The fallback, and the candidates that the engine can call."""
    return frozenset({item.evidence.fallback, *(c.name for c in item.evidence.candidates if c.deployable)})


def halved(study: JudgedStudy, name: str) -> list[Half]:
    """Both ways of each cell."""
    found = []
    for item in study.cells:
        objective = study.judge.objectives.of(item.cell.column)[name]
        routes = deployable(item)
        even = tuple(r for r in item.evidence.rounds if r.index % 2 == 0)
        odd = tuple(r for r in item.evidence.rounds if r.index % 2)
        for seen, judging in ((even, odd), (odd, even)):
            found.append(Half(item, seen, medians(judging, objective, routes), objective, routes))
    return [half for half in found if len(half.truth) > 1]


def beside_oracle(study: JudgedStudy, name: str, source: str) -> list[Half]:
    """Each cell that the recorder has; rules see the study's rounds.

    Raises:
        RecordedError: it has none of them.
    """
    rounds: dict[str, list[Round]] = defaultdict(list)
    for recording in read(source).items:
        rounds[recording.cell.id].extend(recording.rounds)
    found = []
    for item in study.cells:
        if item.cell.id in rounds:
            objective = study.judge.objectives.of(item.cell.column)[name]
            routes = deployable(item)
            truth = medians(rounds[item.cell.id], objective, routes)
            found.append(Half(item, tuple(item.evidence.rounds), truth, objective, routes))
    if not found:
        raise RecordedError(f"{source}: shares no timed cell with {study.where}")
    return [half for half in found if len(half.truth) > 1]


def table_on(half: Half, study: JudgedStudy) -> str:
    """What the decision rule answers from the rounds seen, at N = 1."""
    test = replace(study.judge.test, multiplicity=1)
    evidence = replace(half.item.evidence, rounds=half.seen)
    return decide(evidence, test, objective=half.objective).decision.route or evidence.fallback


def buckets(halves: Sequence[Half], *, one_q_len: bool) -> dict[int, str]:
    """By place in ``halves``: the choice at the nearest measured bucket.

    Measured are every second batch size and every second KV row of an entry, the smallest first; with
    ``one_q_len`` at q_len 1 only. Halves are told apart by the parity of the rounds seen.
    """
    measured: dict[tuple[object, ...], list[tuple[int, int, str]]] = defaultdict(list)
    batches = sorted({half.cell.column.batch_size for half in halves})[::2]
    rows = sorted({half.cell.kv_high for half in halves})[::2]
    for half in halves:
        column = half.cell.column
        at = column.batch_size in batches and half.cell.kv_high in rows
        if at and (column.q_len == 1 or not one_q_len) and (choice := half.quickest()):
            measured[_entry(half, one_q_len)].append((column.batch_size, half.cell.kv_high, choice))
    chosen = {}
    for place, half in enumerate(halves):
        found = measured.get(_entry(half, one_q_len))
        if found:
            size, row = half.cell.column.batch_size, half.cell.kv_high
            nearest = min(
                found, key=lambda at: (abs(log2(at[0] / size)) + abs(log2(at[1] / row)), at[0], at[1])
            )
            chosen[place] = nearest[2]
    return chosen


def _entry(half: Half, one_q_len: bool) -> tuple[object, ...]:
    column = half.cell.column
    parity = half.seen[0].index % 2 if half.seen else 0
    return (column.shape, column.dtypes, 1 if one_q_len else column.q_len, parity)


@dataclass(frozen=True)
class Regret:
    """Of one rule: over ``judged`` choices, the share that was not the best, mean, 99 % and worst."""

    judged: int
    wrong: float
    mean: float
    high: float
    worst: float
    where: str


def regret_of(halves: Sequence[Half], choices: Mapping[int, str]) -> Regret | None:
    """Choices by place in ``halves``; a choice without a judging time is left out. None if all are."""
    lost = [
        (half.truth[choices[place]] / min(half.truth.values()) - 1.0, f"{half.cell}: {choices[place]}")
        for place, half in enumerate(halves)
        if choices.get(place) in half.truth
    ]
    if not lost:
        return None
    values = sorted(value for value, _ in lost)
    worst = max(lost)
    return Regret(
        len(lost),
        sum(value > 0.0 for value in values) / len(values),
        fmean(values),
        values[min(len(values) - 1, int(0.99 * len(values)))],
        worst[0],
        worst[1],
    )


def rules(halves: Sequence[Half], study: JudgedStudy) -> dict[str, dict[int, str]]:
    """Choices by rule, then by place."""
    places = range(len(halves))
    found: dict[str, dict[int, str]] = {
        "table": {i: halves[i].item.choice for i in places},
        "table, final": {i: halves[i].item.choice for i in places if halves[i].item.final},
        "table, half": {i: table_on(halves[i], study) for i in places},
        "always fallback": {i: halves[i].item.evidence.fallback for i in places},
        "stock": {i: halves[i].item.evidence.stock or "" for i in places},
        "always decode": {
            i: next((name for name in DECODE if name in halves[i].deployable), "") for i in places
        },
        "always fa2": {i: FA2 for i in places if FA2 in halves[i].deployable},
        "smallest median": {i: name for i in places if (name := halves[i].quickest())},
        "nearest bucket": buckets(halves, one_q_len=False),
        "nearest bucket, q_len 1": buckets(halves, one_q_len=True),
    }
    return found


def report(halves: Sequence[Half], study: JudgedStudy, *, oracle: bool) -> str:
    """The table."""
    rows: list[list[object]] = []
    for name, choices in rules(halves, study).items():
        if oracle and name == "table, half":
            continue
        found = regret_of(halves, choices)
        if found is not None:
            rows.append(
                [
                    name,
                    found.judged,
                    f"{found.wrong:.1%}",
                    f"{found.mean:.2%}",
                    f"{found.high:.1%}",
                    f"{found.worst:.1%}",
                    found.where,
                ]
            )
    head = ("rule", "judged", "not the best", "mean regret", "99 %", "worst", "where, and the choice")
    return table(head, rows)


def main(arguments: list[str]) -> int:
    """Print the table. Exit 1 if a source cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("--engine", default="generic")
    parser.add_argument("--space", type=Path, help="where the study's space is not the shipped one")
    parser.add_argument("--oracle", metavar="ROUNDS.jsonl")
    parser.add_argument("--objective", help="the study's first if left out")
    options = parser.parse_args(arguments)

    def run() -> None:
        with opened(options.source) as database:
            study = judged(
                database,
                options.source,
                options.engine,
                space=options.space,
                objective=options.objective,
            )
            name = options.objective or study.judge.objectives.first
            halves = beside_oracle(study, name, options.oracle) if options.oracle else halved(study, name)
            if not halves:
                raise RecordedError(f"{options.source}: no cell with two deployable routes timed")
            cells = len({half.cell.id for half in halves})
            judge = f"medians of {options.oracle}" if options.oracle else "halves of the study's own rounds"
            print(f"engine {options.engine}, objective {name}: {cells} cells, judged by {judge}\n")
            print(report(halves, study, oracle=options.oracle is not None), end="")

    return ended(run, "regret")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
