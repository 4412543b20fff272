"""The rule from stored proofs and rounds to one cell's answer. Pure: no clock, no database, no device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from autotune.bench.eprocess import Progress, SignTest, State
from autotune.bench.objective import Objective, graph, paired_ratios
from autotune.bench.record import Round
from autotune.domain.decision import Decision, Reason
from autotune.domain.verdict import Status, Verdict

# Two proven routes are set against each other at a plain 1:20: whichever wins, the table's claim is the one
# against the fallback, so nothing here needs a correction for the number of cells.
CONTEST_ALPHA = 0.05
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

    def __post_init__(self) -> None:
        names = [self.fallback, *(candidate.name for candidate in self.candidates)]
        if len(set(names)) != len(names):
            raise ValueError(f"routes of a cell must differ: {names}")


@dataclass(frozen=True, slots=True)
class Standing:
    """How one candidate stands against the fallback.

    ``progress`` is None where the candidate is not proven safe: its times mean nothing. ``speedup`` is the
    median ratio of all its rounds, ``speedup_low`` the proven lower bound, ``prepare_us`` the median.
    """

    candidate: Candidate
    progress: Progress | None
    speedup: float | None = None
    speedup_low: float | None = None
    prepare_us: float | None = None

    @property
    def name(self) -> str:
        """The route's name."""
        return self.candidate.name

    @property
    def state(self) -> State | None:
        """State of the test; None where there is no test."""
        return self.progress.state if self.progress else None

    @property
    def wins(self) -> bool:
        """Proven safe, proven faster than the fallback, and deployable."""
        return self.candidate.deployable and self.state is State.CLAIM


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell's decision and how each candidate stands, in the order given."""

    decision: Decision
    standings: tuple[Standing, ...]


def decide(evidence: Evidence, test: SignTest, *, objective: Objective = graph) -> Outcome:
    """Answer one cell.

    The answer is a route other than the fallback only where the fallback and the route are proven safe, the
    route's test claims, and the engine can deploy it. Of several such routes the one that beats the others
    wins; among those that no other beats: fewer ``requires``, then less ``prepare``, then the name.
    """
    if blocked := _blocked(evidence):
        return Outcome(blocked, tuple(Standing(candidate, None) for candidate in evidence.candidates))
    standings = _standings(evidence, test, objective)
    winners = [standing for standing in standings if standing.wins]
    if not winners:
        return Outcome(_no_winner(evidence, standings, objective), standings)
    best = min(
        _unbeaten(winners, evidence.rounds, test, objective),
        key=lambda s: (len(s.candidate.verdict.requires), s.prepare_us or 0.0, s.name),
    )
    assert best.progress is not None
    decision = Decision(
        best.name,
        Reason.PROVEN_FASTER,
        f"claimed after {best.progress.n} {test.unit.value}s, {best.progress.above} above the margin",
        speedup_low=best.speedup_low,
        speedup=best.speedup,
        vs_stock=_vs_stock(evidence, best.name, objective),
    )
    return Outcome(decision, standings)


def plan_next(
    evidence: Evidence, test: SignTest, *, objectives: Iterable[Objective] = (graph,)
) -> tuple[str, ...]:
    """Routes that the next round must time, the fallback first; () when the cell needs no more rounds.

    Open are, under any of the objectives, the safe candidates whose test goes on, and deployable winners that
    have not yet been told apart from each other. While anything is open under an objective, its winners are
    timed along: only common rounds compare them.
    """
    if _blocked(evidence) or _used_up(evidence, test):
        return ()
    live = {name for objective in objectives for name in _live(evidence, test, objective)}
    return (evidence.fallback, *(c.name for c in evidence.candidates if c.name in live)) if live else ()


def _live(evidence: Evidence, test: SignTest, objective: Objective) -> set[str]:
    """The candidates that one objective still needs rounds of."""
    standings = _standings(evidence, test, objective)
    winners = [standing for standing in standings if standing.wins]
    running = [standing for standing in standings if standing.state is State.CONTINUE]
    contested = any(
        _contest(a, b, evidence.rounds, test, objective) is State.CONTINUE
        for i, a in enumerate(winners)
        for b in winners[i + 1 :]
    )
    if not running and not contested:
        return set()
    return {standing.name for standing in (*running, *winners)}


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


def _standings(evidence: Evidence, test: SignTest, objective: Objective) -> tuple[Standing, ...]:
    standings = []
    used_up, disturbed = _used_up(evidence, test), _disturbed(evidence.rounds)
    for candidate in evidence.candidates:
        if candidate.verdict.status is not Status.SAFE:
            standings.append(Standing(candidate, None))
            continue
        ratios = paired_ratios(evidence.rounds, evidence.fallback, candidate.name, objective, test.unit)
        prepares = [r.prepare_us[candidate.name] for r in evidence.rounds if candidate.name in r.prepare_us]
        progress = test.follow(ratios)
        if disturbed:  # more rounds may outweigh the dropped ones; to look on is allowed at any stop
            progress = replace(progress, state=State.CONTINUE)
        if used_up and progress.state is State.CONTINUE:  # it joined late and missed some rounds
            progress = replace(progress, state=State.EXHAUSTED)
        standings.append(
            Standing(
                candidate,
                progress,
                speedup=median(ratios) if ratios else None,
                speedup_low=test.lower_bound(ratios),
                prepare_us=median(prepares) if prepares else None,
            )
        )
    return tuple(standings)


def _used_up(evidence: Evidence, test: SignTest) -> bool:
    return max((r.index for r in evidence.rounds), default=-1) + 1 >= test.max_rounds


def _disturbed(rounds: Sequence[Round]) -> bool:
    return sum(1 for r in rounds if r.dropped) > MOST_DROPPED * len(rounds)


def _contest(
    a: Standing, b: Standing, rounds: Sequence[Round], test: SignTest, objective: Objective
) -> State:
    """CLAIM: a beats b; DROP: b beats a; else undecided. Both directions at 1 / CONTEST_ALPHA, no margin."""
    between = replace(test, margin=0.0, multiplicity=1, alpha=CONTEST_ALPHA)
    return between.follow(paired_ratios(rounds, b.name, a.name, objective, test.unit)).state


def _unbeaten(
    winners: Sequence[Standing], rounds: Sequence[Round], test: SignTest, objective: Objective
) -> list[Standing]:
    """Winners that no other winner beats; all of them if each is beaten (a circle)."""
    beaten: Mapping[str, bool] = {
        b.name: any(_contest(a, b, rounds, test, objective) is State.CLAIM for a in winners if a is not b)
        for b in winners
    }
    return [w for w in winners if not beaten[w.name]] or list(winners)


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
    return Decision(None, reason, detail, vs_stock=_vs_stock(evidence, evidence.fallback, objective))


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
            ended = f"{standing.name}: timing stopped after {standing.progress.n}"
            return Reason.UNPROVEN, f"{ended}: {trouble}" if trouble else ended
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


def _vs_stock(evidence: Evidence, answer: str, objective: Objective) -> float | None:
    """Median of time(stock) / time(answer); None where the stock was not timed beside it."""
    if evidence.stock is None:
        return None
    ratios = paired_ratios(evidence.rounds, evidence.stock, answer, objective)
    return median(ratios) if ratios else None
