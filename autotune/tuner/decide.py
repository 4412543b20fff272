"""The rule from stored proofs and rounds to one cell's answer. Pure: no clock, no database, no device.

Once tau is known, the shift between processes, a claim must pass ``max(margin, 3 tau)``, and one that passes
it by less than 3 tau more needs a second process to agree: its own rounds, its own sign test against the same
margin, at 1:20. It needs no correction for the number of cells, since it only takes claims away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

from autotune.bench.eprocess import Progress, SignTest, State
from autotune.bench.objective import Objective, graph, paired_ratios
from autotune.bench.record import Round
from autotune.domain.decision import Decision, Reason
from autotune.domain.margin import margin_of, near_until
from autotune.domain.verdict import Status, Verdict

# Two proven routes are set against each other at a plain 1:20: whichever wins, the table's claim is the one
# against the fallback, so nothing here needs a correction for the number of cells.
CONTEST_ALPHA = 0.05
# Rounds of second processes in all: at a median 3 % past the margin and 3 % noise, half of them are enough.
AGREE_ROUNDS = 64
# More rounds than this lost to a slowed-down device, and what is left says nothing about the device as it is.
MOST_DROPPED = 0.2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A route other than the fallback, and what is known of it in this cell's column.

    ``deployable`` is whether the engine can call it; one that it cannot is measured and shown, never chosen.
    """

    name: str
    verdict: Verdict
    deployable: bool = True


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that a cell's answer rests on.

    Attributes:
        fallback, fallback_verdict: the context route that answers for everything unproven.
        candidates: the other routes, the fallback not among them, names unique.
        rounds: every stored round of the cell.
        again: its rounds in later processes, numbered on from process to process: a test of them all is a
            test, a test of the last one that came out well is not.
        stock: what the engine calls without us; may be the fallback or a candidate. None: unknown.
        too_large: why the cell cannot run on this device at all; empty if it can.
        trouble: why timing last ended before its time, through no route's fault; empty if it did not.
    """

    fallback: str
    fallback_verdict: Verdict
    candidates: Sequence[Candidate]
    rounds: Sequence[Round] = ()
    stock: str | None = None
    too_large: str = ""
    trouble: str = ""
    again: Sequence[Round] = ()

    def __post_init__(self) -> None:
        names = [self.fallback, *(candidate.name for candidate in self.candidates)]
        if len(set(names)) != len(names):
            raise ValueError(f"routes of a cell must differ: {names}")


@dataclass(frozen=True, slots=True)
class Standing:
    """How one candidate stands against the fallback.

    ``progress`` is None where the candidate is not proven safe: its times mean nothing. ``speedup`` is the
    median ratio of all its rounds, ``speedup_low`` the proven lower bound, ``prepare_us`` the median.
    ``near`` is whether it claims by so little that a second process must agree, ``second`` how far that one's
    test is. ``clearing`` is whether more rounds of the first process may still spare it the second: a claim
    is made at the first round that allows it, and its bound is then just past the margin whatever the ratio.
    """

    candidate: Candidate
    progress: Progress | None
    speedup: float | None = None
    speedup_low: float | None = None
    prepare_us: float | None = None
    near: bool = False
    second: Progress | None = None
    clearing: bool = False

    @property
    def name(self) -> str:
        """The route's name."""
        return self.candidate.name

    @property
    def state(self) -> State | None:
        """State of the test; None where there is no test."""
        return self.progress.state if self.progress else None

    @property
    def pending(self) -> bool:
        """It claims, and the second process that must agree has not answered yet."""
        return self.near and (self.second is None or not self.second.state.final)

    @property
    def refused(self) -> bool:
        """It claims, and the second process that must agree did not."""
        return self.near and not self.pending and self.second is not None and not _claims(self.second)

    @property
    def wins(self) -> bool:
        """Proven safe, deployable, and faster than the fallback as far as has been measured."""
        return self.candidate.deployable and self.state is State.CLAIM and not self.refused


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell's decision and how each candidate stands, in the order given."""

    decision: Decision
    standings: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """What a cell is asked: by which objective, at which tau; None: not measured."""

    objective: Objective = graph
    tau: float | None = None


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
    standings = _standings(evidence, test, question)
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
    standings = _standings(evidence, test, question)
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
        for name in _live(evidence, test, question.objective, _standings(evidence, test, question))
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
        standings = _standings(evidence, test, question)
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
    unbeaten = _unbeaten(winners, rounds, test, objective)
    running = [
        standing
        for standing in standings
        if standing.state is State.CONTINUE
        and not (standing.candidate.deployable and _beaten(standing, winners, rounds, test, objective))
    ]
    left = {e.name: rounds_left(rounds, (evidence.fallback, e.name), test.max_rounds) for e in unbeaten}
    contested = any(
        _contestable(a, b, rounds, test, objective, min(left[a.name], left[b.name]))
        for i, a in enumerate(unbeaten)
        for b in unbeaten[i + 1 :]
    )
    if not running and not contested and not any(standing.clearing for standing in unbeaten):
        return set()
    return {standing.name for standing in (*running, *unbeaten)}


def _best(
    standings: Sequence[Standing], rounds: Sequence[Round], test: SignTest, objective: Objective
) -> Standing | None:
    winners = [standing for standing in standings if standing.wins]
    if not winners:
        return None
    return min(
        _unbeaten(winners, rounds, test, objective),
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


def _standings(evidence: Evidence, test: SignTest, question: Question) -> tuple[Standing, ...]:
    standings = []
    objective, tau = question.objective, question.tau
    until = near_until(test.margin, tau)
    test, second, clear = _applied(test, tau)
    for candidate in evidence.candidates:
        if candidate.verdict.status is not Status.SAFE:
            standings.append(Standing(candidate, None))
            continue
        pair = (evidence.fallback, candidate.name)
        ratios = paired_ratios(evidence.rounds, *pair, objective, test.unit)
        prepares = [r.prepare_us[candidate.name] for r in evidence.rounds if candidate.name in r.prepare_us]
        progress = progress_of(pair, ratios, evidence.rounds, test)
        bound = test.lower_bound(ratios)
        near = progress.state is State.CLAIM and bound is not None and bound <= until
        again = paired_ratios(evidence.again, *pair, objective, test.unit) if near else []
        standing = Standing(
            candidate,
            progress,
            speedup=median(ratios) if ratios else None,
            speedup_low=bound,
            prepare_us=median(prepares) if prepares else None,
            near=near,
            second=progress_of(pair, again, evidence.again, second) if near and evidence.again else None,
        )
        if standing.pending:
            going = progress_of(pair, ratios, evidence.rounds, clear).state is State.CONTINUE
            standing = replace(standing, clearing=going)
        standings.append(standing)
    return tuple(standings)


@lru_cache(maxsize=64)
def _applied(test: SignTest, tau: float | None) -> tuple[SignTest, SignTest, SignTest]:
    """The test at the margin that tau asks for, the one that a second process must pass, and the one that
    spares a claim the second process."""
    first = replace(test, margin=margin_of(test.margin, tau))
    most = min(AGREE_ROUNDS, test.max_rounds)
    second = replace(first, multiplicity=1, alpha=CONTEST_ALPHA, max_rounds=most)
    return first, second, replace(test, margin=near_until(test.margin, tau) - 1.0)


def rounds_left(rounds: Sequence[Round], pair: tuple[str, str], most: int) -> int:
    """Rounds of a cell that are left to two routes: ``most`` from the first one that both were in.

    A route that is proven late, when the others have had theirs, has its own ahead of it; so have all others
    beside a fallback that is.
    """
    one, other = pair
    first = min((r.index for r in rounds if one in r.run_us and other in r.run_us), default=None)
    return most if first is None else max(0, most - (_count(rounds) - first))


def most_left(evidences: Iterable[Evidence], live: Sequence[str], rounds: Sequence[Round], most: int) -> int:
    """Rounds that any of the ``live`` routes has left beside any engine's fallback among them."""
    fallbacks = {each.fallback for each in evidences} & set(live)
    return max(rounds_left(rounds, (one, other), most) for one in fallbacks for other in live if other != one)


def progress_of(
    pair: tuple[str, str], ratios: Sequence[float], rounds: Sequence[Round], test: SignTest
) -> Progress:
    """Where the test of fallback and candidate stands after their ``ratios``, of the cell's ``rounds``.

    Its chance may be gone, and its answer is open while too many rounds were dropped.
    """
    progress = test.follow(ratios)
    left = rounds_left(rounds, pair, test.max_rounds)
    if _disturbed(rounds):  # more rounds may outweigh the dropped ones; to look on is allowed at any stop
        progress = replace(progress, state=State.CONTINUE)
    # a block may be begun already
    elif test.hopeless(progress, -(-left // test.unit.rounds)):
        progress = replace(progress, state=State.EXHAUSTED)
    if left <= 0 and progress.state is State.CONTINUE:  # it was not in all of its rounds
        progress = replace(progress, state=State.EXHAUSTED)
    return progress


def _claims(progress: Progress) -> bool:
    return progress.state is State.CLAIM


def _count(rounds: Sequence[Round]) -> int:
    return max((r.index for r in rounds), default=-1) + 1


def _disturbed(rounds: Sequence[Round]) -> bool:
    return sum(1 for r in rounds if r.dropped) > MOST_DROPPED * len(rounds)


@lru_cache(maxsize=64)
def _between(test: SignTest) -> SignTest:
    return replace(test, margin=0.0, multiplicity=1, alpha=CONTEST_ALPHA)


def _contest(
    a: Standing, b: Standing, rounds: Sequence[Round], test: SignTest, objective: Objective
) -> Progress:
    """CLAIM: a beats b; DROP: b beats a; else undecided. Both directions at 1 / CONTEST_ALPHA, no margin."""
    return _between(test).follow(paired_ratios(rounds, b.name, a.name, objective, test.unit))


def _contestable(
    a: Standing, b: Standing, rounds: Sequence[Round], test: SignTest, objective: Objective, left: int
) -> bool:
    """Whether the rounds that are left could still tell the two apart."""
    seen = _contest(a, b, rounds, test, objective)
    values = -(-left // test.unit.rounds)
    ahead, behind = seen, replace(seen, above=seen.below)
    return not seen.state.final and not all(_between(test).hopeless(each, values) for each in (ahead, behind))


def _beaten(
    standing: Standing,
    winners: Sequence[Standing],
    rounds: Sequence[Round],
    test: SignTest,
    objective: Objective,
) -> bool:
    """Whether one of the winners beats it."""
    return any(
        _claims(_contest(winner, standing, rounds, test, objective))
        for winner in winners
        if winner is not standing
    )


def _unbeaten(
    winners: Sequence[Standing], rounds: Sequence[Round], test: SignTest, objective: Objective
) -> list[Standing]:
    """Winners that no other winner beats; all of them if each is beaten (a circle)."""
    return [w for w in winners if not _beaten(w, winners, rounds, test, objective)] or list(winners)


def _no_winner(evidence: Evidence, standings: Sequence[Standing], objective: Objective) -> Decision:
    """The reason that says most: a danger, a gap that more work could fill, a measured answer."""
    deployable = [standing for standing in standings if standing.candidate.deployable]
    advice = [s for s in standings if not s.candidate.deployable and s.state is State.CLAIM]
    reason, detail = _reason(deployable, evidence.trouble)
    if reason is Reason.UNDECIDED and _disturbed(evidence.rounds):
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
