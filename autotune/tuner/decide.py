"""The rule from a cell's evidence to its answer, and what must still be timed for it. Pure: no clock, no
database, no device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from autotune.bench.eprocess import SignTest, State
from autotune.bench.objective import Objective, graph, paired_ratios
from autotune.bench.record import Round
from autotune.domain.decision import Decision, Reason
from autotune.domain.margin import near_until
from autotune.domain.verdict import Status
from autotune.tuner.standing import (
    Evidence,
    Question,
    Standing,
    beaten,
    contestable,
    disturbed,
    rounds_left,
    standings_of,
    unbeaten,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell's decision and how each candidate stands, in the order given."""

    decision: Decision
    standings: tuple[Standing, ...]


_GRAPH = Question()


@dataclass(frozen=True, slots=True)
class Answer:
    """All that one question says of a cell, from one reading of its rounds.

    Attributes:
        outcome: as :func:`decide` gives it.
        live: candidates that need more rounds, as in :func:`plan_next`.
        second: the route that would be the answer but for a second process, as in :func:`plan_second`.
    """

    outcome: Outcome
    live: frozenset[str] = frozenset()
    second: str | None = None


def answer(evidence: Evidence, test: SignTest, question: Question = _GRAPH) -> Answer:
    """:func:`decide`, :func:`plan_next` and :func:`plan_second` of one question at the price of one."""
    if blocked := _blocked(evidence):
        return Answer(Outcome(blocked, tuple(Standing(candidate, None) for candidate in evidence.candidates)))
    standings = standings_of(evidence, test, question)
    best = _best(standings, evidence.rounds, test, question.objective)
    return Answer(
        _outcome(evidence, test, question, standings, best),
        frozenset(_live(evidence, test, question.objective, standings)),
        best.name if best is not None and best.pending else None,
    )


def decide(
    evidence: Evidence, test: SignTest, *, objective: Objective = graph, tau: float | None = None
) -> Outcome:
    """Answer one cell.

    The answer is a route other than the fallback only where the fallback and the route are proven safe, the
    route's test claims, a second process agrees if it must, and the engine can deploy it. Of several such
    routes the one that beats the others wins; among those that no other beats: fewer ``requires``, then less
    ``prepare``, then the name. Where that one still waits for its second process the cell is unproven.

    Args:
        test: the study's; its margin is the floor.
        tau: the shift between processes under ``objective``; None while it is not measured.
    """
    if blocked := _blocked(evidence):
        return Outcome(blocked, tuple(Standing(candidate, None) for candidate in evidence.candidates))
    question = Question(objective, tau)
    standings = standings_of(evidence, test, question)
    best = _best(standings, evidence.rounds, test, objective)
    return _outcome(evidence, test, question, standings, best)


def _outcome(
    evidence: Evidence,
    test: SignTest,
    question: Question,
    standings: tuple[Standing, ...],
    best: Standing | None,
) -> Outcome:
    objective, tau = question.objective, question.tau
    if best is None:
        return Outcome(_no_winner(evidence, standings, objective), standings)
    if best.pending:
        waiting = Decision(
            None, Reason.UNPROVEN, _waiting(best, test, tau), vs_stock=_vs_fallback(evidence, objective)
        )
        return Outcome(waiting, standings)
    assert best.progress is not None
    detail = f"claimed after {best.progress.n} {test.unit.value}s, {best.progress.above} above the margin"
    if best.near and best.second is not None:
        detail += f"; a second process agreed after {best.second.n}, {best.second.above} above"
    decision = Decision(
        best.name,
        Reason.PROVEN_FASTER,
        detail,
        speedup_low=best.speedup_low,
        speedup=best.speedup,
        vs_stock=_vs_stock(evidence, best.name, objective),
    )
    return Outcome(decision, standings)


def plan_next(
    evidence: Evidence, test: SignTest, *, questions: Iterable[Question] = (_GRAPH,)
) -> tuple[str, ...]:
    """Routes that the next round must time, the fallback first; () when the cell needs no more rounds.

    Open are, under any of the questions, the safe candidates whose test goes on, and deployable winners that
    have not yet been told apart from each other, and near claims that more rounds may clear of the second
    process, which costs more than they do. While anything is open under a question, its winners are
    timed along: only common rounds compare them. A route that another winner beats can no longer win, whether
    it claims or not, and leaves; so does one that could not claim in all the rounds that are left.
    """
    if _blocked(evidence):
        return ()
    live = {
        name
        for question in questions
        for name in _live(evidence, test, question.objective, standings_of(evidence, test, question))
    }
    return (evidence.fallback, *(c.name for c in evidence.candidates if c.name in live)) if live else ()


def plan_second(
    evidence: Evidence, test: SignTest, *, questions: Iterable[Question] = (_GRAPH,)
) -> tuple[str, ...]:
    """Routes that a second process must time, the fallback first; () where no answer waits for one.

    They are the routes that would be the answer but for that: one that another beats, or that loses the tie
    rule, need not be timed again.
    """
    if _blocked(evidence):
        return ()
    wanted = set()
    for question in questions:
        standings = standings_of(evidence, test, question)
        best = _best(standings, evidence.rounds, test, question.objective)
        if best is not None and best.pending:
            wanted.add(best.name)
    return (evidence.fallback, *(c.name for c in evidence.candidates if c.name in wanted)) if wanted else ()


def _live(
    evidence: Evidence, test: SignTest, objective: Objective, standings: Sequence[Standing]
) -> set[str]:
    """The candidates that one question still needs rounds of."""
    rounds = evidence.rounds
    winners = [standing for standing in standings if standing.wins]
    ahead = unbeaten(winners, rounds, test, objective)
    running = [
        standing
        for standing in standings
        if standing.state is State.CONTINUE
        and not (standing.candidate.deployable and beaten(standing, winners, rounds, test, objective))
    ]
    left = {e.name: rounds_left(rounds, (evidence.fallback, e.name), test.max_rounds) for e in ahead}
    contested = any(
        contestable(a, b, rounds, test, objective, min(left[a.name], left[b.name]))
        for i, a in enumerate(ahead)
        for b in ahead[i + 1 :]
    )
    if not running and not contested and not any(standing.clearing for standing in ahead):
        return set()
    return {standing.name for standing in (*running, *ahead)}


def _best(
    standings: Sequence[Standing], rounds: Sequence[Round], test: SignTest, objective: Objective
) -> Standing | None:
    winners = [standing for standing in standings if standing.wins]
    if not winners:
        return None
    return min(
        unbeaten(winners, rounds, test, objective),
        key=lambda s: (len(s.candidate.verdict.requires), s.prepare_us or 0.0, s.name),
    )


def _waiting(standing: Standing, test: SignTest, tau: float | None) -> str:
    assert standing.speedup_low is not None
    until = near_until(test.margin, tau)
    said = f"{standing.name}: its bound {standing.speedup_low:.3f} is under {until:.3f}"
    seen = f", {standing.second.n} {test.unit.value}s of it are timed" if standing.second else ""
    return f"{said}: {'more rounds or ' if standing.clearing else ''}a second process must agree{seen}"


def _blocked(evidence: Evidence) -> Decision | None:
    """The decision where no candidate matters: the fallback itself is not proven safe."""
    verdict, name = evidence.fallback_verdict, evidence.fallback
    if verdict.status is Status.UNSAFE:
        assert verdict.kind is not None
        return Decision(
            None, Reason.NO_SAFE_ROUTE, f"fallback {name}: {verdict.kind.value} {verdict.reason}".strip()
        )
    if evidence.too_large:
        return Decision(None, Reason.TOO_LARGE, evidence.too_large)
    if verdict.status in (Status.UNSUPPORTED, Status.REFUSED):
        return Decision(
            None, Reason.NO_SAFE_ROUTE, f"fallback {name}: {verdict.status.value} {verdict.reason}".strip()
        )
    if verdict.status is not Status.SAFE:
        return Decision(None, Reason.UNPROVEN, f"fallback {name}: {verdict.reason or 'not proven yet'}")
    return None


def _no_winner(evidence: Evidence, standings: Sequence[Standing], objective: Objective) -> Decision:
    """The reason that says most: a danger, a gap that more work could fill, a measured answer."""
    deployable = [standing for standing in standings if standing.candidate.deployable]
    advice = [s for s in standings if not s.candidate.deployable and s.state is State.CLAIM]
    reason, detail = _reason(deployable, evidence.trouble)
    if reason is Reason.UNDECIDED and disturbed(evidence.rounds):
        lost = [r.dropped for r in evidence.rounds if r.dropped]
        detail = f"{len(lost)} of {len(evidence.rounds)} rounds were dropped: {lost[-1]}"
    if advice:
        faster = ", ".join(f"{s.name} {s.speedup:.2f}x" for s in advice)
        detail = (
            f"{detail}; faster but not deployable here: {faster}"
            if detail
            else (f"faster but not deployable here: {faster}")
        )
    return Decision(None, reason, detail, vs_stock=_vs_fallback(evidence, objective))


def _reason(standings: Sequence[Standing], trouble: str) -> tuple[Reason, str]:
    for standing in standings:
        verdict = standing.candidate.verdict
        if verdict.status is Status.UNSAFE:
            assert verdict.kind is not None
            return Reason.CANDIDATE_UNSAFE, f"{standing.name}: {verdict.kind.value} {verdict.reason}".strip()
    for standing in standings:
        verdict = standing.candidate.verdict
        if verdict.status is Status.UNPROVEN:
            return Reason.UNPROVEN, f"{standing.name}: {verdict.reason or 'not proven yet'}"
        if standing.state is State.CONTINUE:
            assert standing.progress is not None
            n = standing.progress.n
            ended = f"{standing.name}: {f'timing stopped after {n}' if n else 'not timed yet'}"
            return Reason.UNPROVEN, f"{ended}: {trouble}" if trouble else ended
    for standing in standings:
        if standing.refused:
            assert standing.second is not None
            seen = standing.second
            ended = f"{standing.name}: claimed, but a second process did not agree"
            return Reason.UNDECIDED, f"{ended}: {seen.above} of {seen.n} above the margin"
    for state, reason in ((State.EXHAUSTED, Reason.UNDECIDED), (State.DROP, Reason.NOT_FASTER)):
        for standing in standings:
            if standing.state is state:
                assert standing.progress is not None
                seen = standing.progress
                return reason, f"{standing.name}: {seen.above} of {seen.n} above the margin"
    if not standings:
        return Reason.UNSUPPORTED, "no candidate"
    verdict = standings[0].candidate.verdict
    return Reason.UNSUPPORTED, f"{standings[0].name}: {verdict.reason or verdict.status.value}"


def _vs_fallback(evidence: Evidence, objective: Objective) -> float | None:
    return _vs_stock(evidence, evidence.fallback, objective)


def _vs_stock(evidence: Evidence, answer: str, objective: Objective) -> float | None:
    """Median of time(stock) / time(answer); None where the stock was not timed beside it."""
    if evidence.stock is None:
        return None
    ratios = paired_ratios(evidence.rounds, evidence.stock, answer, objective)
    return median(ratios) if ratios else None
