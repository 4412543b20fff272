"""How a cell's candidates stand against its fallback and each other, from stored proofs and rounds. Pure.

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
class Question:
    """What a cell is asked: by which objective, at which tau; None: not measured."""

    objective: Objective = graph
    tau: float | None = None


def standings_of(evidence: Evidence, test: SignTest, question: Question) -> tuple[Standing, ...]:
    """How each candidate stands, in the order given. The test is the study's: its margin is the floor."""
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
    if disturbed(rounds):  # more rounds may outweigh the dropped ones; to look on is allowed at any stop
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


def disturbed(rounds: Sequence[Round]) -> bool:
    """Whether too many of them were dropped for the others to say anything."""
    return sum(1 for r in rounds if r.dropped) > MOST_DROPPED * len(rounds)


@lru_cache(maxsize=64)
def _between(test: SignTest) -> SignTest:
    return replace(test, margin=0.0, multiplicity=1, alpha=CONTEST_ALPHA)


def _contest(
    a: Standing, b: Standing, rounds: Sequence[Round], test: SignTest, objective: Objective
) -> Progress:
    """CLAIM: a beats b; DROP: b beats a; else undecided. Both directions at 1 / CONTEST_ALPHA, no margin."""
    return _between(test).follow(paired_ratios(rounds, b.name, a.name, objective, test.unit))


def contestable(
    a: Standing, b: Standing, rounds: Sequence[Round], test: SignTest, objective: Objective, left: int
) -> bool:
    """Whether the rounds that are left could still tell the two apart."""
    seen = _contest(a, b, rounds, test, objective)
    values = -(-left // test.unit.rounds)
    ahead, behind = seen, replace(seen, above=seen.below)
    return not seen.state.final and not all(_between(test).hopeless(each, values) for each in (ahead, behind))


def beaten(
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


def unbeaten(
    winners: Sequence[Standing], rounds: Sequence[Round], test: SignTest, objective: Objective
) -> list[Standing]:
    """Winners that no other winner beats; all of them if each is beaten (a circle)."""
    return [w for w in winners if not beaten(w, winners, rounds, test, objective)] or list(winners)
