"""Does a table still hold on its machine? What a fresh small study says about a sample of its cells.

The study is a run like any other, with two differences. Its N counts the sampled cells only, so fewer rounds
suffice. And a drop must be as sure as a claim, at N / 0.05 instead of 20: here a wrong drop is a false alarm
about a good table. So the chance of any wrong claim in one verification is at most 5 %, and of any wrong
drop another 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from autotune.bench.eprocess import State
from autotune.bench.objective import Objective, paired_ratios
from autotune.domain.decision import FALLBACK_LETTERS, Reason
from autotune.domain.verdict import Status
from autotune.table.letters import NO_SAFE_ROUTE, NOT_FASTER, RESERVED, UNPROVEN, agree
from autotune.tuner.lineup import line_up
from autotune.tuner.publish import accused
from autotune.tuner.standing import CONTEST_ALPHA

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.verdict import Verdict
    from autotune.routes.base import Route
    from autotune.table.model import RoutingTable
    from autotune.tuner.answered import Answered
    from autotune.tuner.decide import Outcome as Decided
    from autotune.tuner.run import OpenedRun
    from autotune.tuner.standing import Evidence, Standing
    from autotune.tuner.target import Target


class Outcome(str, Enum):
    """What the new evidence says about one letter."""

    SAME = "same"
    CHANGED = "changed"  # it contradicts the letter
    UNDECIDED = "undecided"  # the last round there may be settled nothing
    UNSAFE = "unsafe"  # a route that the table held to be safe is not
    OPEN = "open"  # a proof or the timing is not finished


@dataclass(frozen=True, slots=True)
class Finding:
    """One sampled cell, before and after.

    Attributes:
        after: what the letter would be, a route or a reserved letter; ``?`` where that is not known.
        speedup, speedup_low, vs_stock: of the route that the table names, or else of the one named now; the
            median, the proven lower bound, and the median against what the engine calls by itself.
        checks: behind the verdict on that route here.
        repro: commands that show again why a route is unsafe.
    """

    place: Answered
    outcome: Outcome
    after: str
    detail: str
    speedup: float | None = None
    speedup_low: float | None = None
    vs_stock: float | None = None
    checks: int | None = None
    repro: tuple[str, ...] = ()


class IncomparableError(ValueError):
    """This version would not make the table's cells the table's way; the message says where it differs."""


def strict(run: OpenedRun) -> None:
    """Make a drop of this study as sure as a claim, before anything is timed."""
    test = replace(run.test, drop_at=math.ceil(run.test.claim_at))
    run.test = test
    for judge in run.judges:
        judge.test = test


def route_names(table: RoutingTable, deployable: Iterable[str]) -> tuple[str, ...]:
    """The routes that a verification races where they are installed: all that the table speaks of.

    A table that speaks of fallbacks only does not say which candidates it was measured with: then also those
    that its engine can deploy.
    """
    known = [*table.families, *(item.route for item in table.unsafe)]
    if set(known) <= {entry.fallback for entry in table.entries}:
        known += deployable
    return tuple(dict.fromkeys(known))


def require_same_fallbacks(sample: Iterable[Answered], routes: Mapping[str, Route], target: Target) -> None:
    """Refuse a sample whose fallbacks are not the table's: every ratio would mean something else.

    Raises:
        IncomparableError: in one line.
    """
    seen: set[Column] = set()
    for place in sample:
        column = place.cell.column
        if column in seen:
            continue
        seen.add(column)
        found = line_up(column, routes, target.engine, target.arch, target.facts).fallback
        name = found.name if found is not None else "none"
        if name != place.entry.fallback and place.answer != NO_SAFE_ROUTE:
            raise IncomparableError(
                f"{column}: the table's fallback is {place.entry.fallback}, this version's is {name}; "
                "give the engine file that it was made with, or make the table again"
            )


def findings(run: OpenedRun, sample: Iterable[Answered]) -> tuple[Finding, ...]:
    """What the stored rows say about each cell of the sample, in its order."""
    repros: dict[tuple[str, str], list[str]] = {}
    for proof in accused(run):
        repros.setdefault((proof.column.id, proof.route), []).append(proof.repro or proof.result.detail)
    return tuple(_finding(run, place, repros) for place in sample)


def _finding(run: OpenedRun, place: Answered, repros: Mapping[tuple[str, str], list[str]]) -> Finding:
    judge, cell = run.judge, place.cell
    evidence = judge.evidence(cell)
    found = judge.outcome(cell, evidence)
    decision = found.decision
    own = decision.route or FALLBACK_LETTERS[decision.reason]
    after = agree([*place.beside, own])
    verdicts = {
        evidence.fallback: evidence.fallback_verdict,
        **{candidate.name: candidate.verdict for candidate in evidence.candidates},
    }
    shown = place.route or decision.route
    standing = next((each for each in found.standings if each.name == shown), None)
    finding = Finding(
        place,
        Outcome.SAME,
        after,
        decision.detail,
        standing.speedup if standing else None,
        standing.speedup_low if standing else None,
        decision.vs_stock,
        verdicts[shown].checks if shown in verdicts else None,
    )
    if newly := _newly_unsafe(place, evidence, verdicts):
        said = "; ".join(f"{name}: {_why(verdicts[name])}" for name in newly)
        again = [line for name in newly for line in repros.get((cell.column.id, name), ())]
        return replace(finding, outcome=Outcome.UNSAFE, detail=said, repro=tuple(dict.fromkeys(again)))
    if place.route is not None:
        objective = judge.objectives.of(cell.column)[judge.objectives.first]
        return _of_route(finding, place.route, found, standing, verdicts, run, evidence, objective)
    if own == UNPROVEN:
        return replace(finding, outcome=Outcome.OPEN, after=UNPROVEN)
    if after != place.answer:
        return replace(finding, outcome=Outcome.CHANGED)
    undecided = decision.reason is Reason.UNDECIDED
    return replace(finding, outcome=Outcome.UNDECIDED if undecided else Outcome.SAME)


def _newly_unsafe(place: Answered, evidence: Evidence, verdicts: Mapping[str, Verdict]) -> list[str]:
    """Routes unsafe here that the letter says are not.

    A route's letter vouches for that route and the fallback, ``.`` for every candidate too, ``!`` for the
    fallback, ``#`` for none.
    """
    if place.answer == NO_SAFE_ROUTE:
        return []
    vouched = {evidence.fallback}
    if place.route is not None:
        vouched.add(place.route)
    elif place.answer == NOT_FASTER:
        vouched |= {candidate.name for candidate in evidence.candidates if candidate.deployable}
    return [name for name in verdicts if name in vouched and verdicts[name].status is Status.UNSAFE]


def _of_route(
    finding: Finding,
    name: str,
    found: Decided,
    standing: Standing | None,
    verdicts: Mapping[str, Verdict],
    run: OpenedRun,
    evidence: Evidence,
    objective: Objective,
) -> Finding:
    """A letter that names a route: it stays where its test claims again, and goes where it drops."""
    decision = found.decision
    if standing is None or standing.progress is None:
        if name in verdicts and verdicts[name].status is not Status.SAFE:
            why = f"{name}: {_why(verdicts[name])}"
        else:
            why = decision.detail or f"{name}: not measured"
        return replace(finding, outcome=Outcome.OPEN, after=UNPROVEN, detail=why)
    seen = standing.progress
    detail = f"{name}: {seen.above} of {seen.n} above the margin"
    if standing.state is State.DROP:
        return replace(finding, outcome=Outcome.CHANGED, detail=detail)
    if standing.state is State.EXHAUSTED:
        return replace(finding, outcome=Outcome.UNDECIDED, detail=detail)
    if standing.state is State.CONTINUE:
        return replace(finding, outcome=Outcome.OPEN, after=UNPROVEN, detail=decision.detail or detail)
    if decision.route is not None and decision.route != name:
        between = replace(run.test, margin=0.0, multiplicity=1, alpha=CONTEST_ALPHA)
        ratios = paired_ratios(evidence.rounds, name, decision.route, objective, run.test.unit)
        if between.follow(ratios).state is State.CLAIM:
            return replace(
                finding, outcome=Outcome.CHANGED, detail=f"{detail}; {decision.route} is faster still"
            )
    return replace(finding, after=agree([*finding.place.beside, name]), detail=detail)


def _why(verdict: Verdict) -> str:
    kind = f"{verdict.kind.value} " if verdict.kind else f"{verdict.status.value} "
    return f"{kind}{verdict.reason}".strip()


def meaning(answer: str) -> str:
    """An answer in words: a route's name, or what a reserved letter means."""
    return RESERVED.get(answer, answer)
