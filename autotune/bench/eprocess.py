"""The sign e-process: a test of "more than ``1 + margin`` times faster" that is valid at any stop.

**Setting.** Round i gives a ratio r_i = time(fallback) / time(candidate). For a threshold t (here
t = 1 + margin) let X_i = 1 if r_i > t, else 0: a tie counts against the claim. The null hypothesis is

    H0(t): P(r_i > t | rounds 1 .. i-1) <= 1/2 for every i,

that is, no round has a conditional median above t. Nothing else is assumed: no normality, no moments, no
equal distributions, no independence beyond what H0 says.

**Derivation.** For p in [1/2, 1] the likelihood ratio of n rounds with S ones against a fair coin is
L_n(p) = (2p)^S (2 - 2p)^(n - S). Its next factor has, if P(X = 1 | past) = u, the conditional expectation
2pu + (2 - 2p)(1 - u), which is 1 at u = 1/2 and rises in u: so L_n(p) is a test martingale at u = 1/2 and a
supermartingale at u < 1/2. With 2p = 1 + b it is the wealth of a gambler who stakes the share b in [0, 1]
on every "above". A mixture over p of such wealths is one too. The uniform mixture over p in [1/2, 1]
(density 2; the share b uniform over [0, 1]) has a closed form:

    E+ = integral of 2 L_n(p) dp over [1/2, 1] = 2^(n+1) B(S+1, n-S+1) P(Beta(S+1, n-S+1) >= 1/2),

and since B(S+1, n-S+1) = 1 / ((n+1) C(n, S)) and P(Beta(S+1, n-S+1) >= 1/2) = P(Binomial(n+1, 1/2) <= S),

    E+ = sum over j <= S of C(n+1, j) / ((n+1) C(n, S)).

E+ starts at 1 (n = 0). By Ville's inequality P(E+ ever reaches x) <= 1/x under H0, whatever the
stopping rule: looks after every round, resumes and extensions included. E- is the same with the rounds
below t, for the opposite null hypothesis.

**A margin that moves afterwards.** Let t* bound the conditional medians of all rounds from above. H0(t*) is
true, so by Ville's inequality E+ at threshold t* ever reaches N / alpha with probability alpha / N at most. A
claim at a threshold t >= t* would be false; fewer ratios lie above t than above t*, and E+ rises in their
number, so at that very n the E+ at t* has reached N / alpha too. Outside that one event, then, every claim is
true, whatever its margin and however that was chosen: before, after, from these rounds or from other ones.
This is all that is used when tau (:mod:`autotune.bench.shift`) moves the margin: the stored rounds are read
again from the first with the margin as it is now, and a claim that it does not bear out is open again or
dropped.

**Sources.** Ville 1939 (the inequality); Robbins 1970 and Robbins and Siegmund 1974 (mixtures and one-sided
power-one tests); Shafer 2021 and Ramdas, Grünwald, Vovk and Shafer 2023, "Game-theoretic statistics and safe
anytime-valid inference" (test martingales as betting, e-processes); Howard and Ramdas 2022 (confidence
sequences for quantiles, of which the bound below is the median's one-sided case).

Integers and fractions only, so that a stored study is judged equally on every machine.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache, lru_cache
from math import comb, isfinite

# A drop costs speed, never safety or truth, so it needs no correction for the number of cells.
DROP_AT = 20
MAX_ROUNDS = 128


class State(str, Enum):
    """Where the test of one candidate in one cell stands."""

    CLAIM = "claim"
    DROP = "drop"
    CONTINUE = "continue"
    EXHAUSTED = "exhausted"

    @property
    def final(self) -> bool:
        """Whether more rounds cannot change it."""
        return self is not State.CONTINUE


class Unit(str, Enum):
    """What one value of the test is: a round, or the low median of 4 consecutive rounds."""

    ROUND = "round"
    BLOCK4 = "block4"

    @property
    def rounds(self) -> int:
        """Rounds per value."""
        return 1 if self is Unit.ROUND else 4


@cache
def e_value(n: int, successes: int) -> Fraction:
    """E+ of ``successes`` among ``n`` values, exactly.

    Raises:
        ValueError: not 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0..{n}, not {successes}")
    below = sum(comb(n + 1, j) for j in range(successes + 1))
    return Fraction(below, (n + 1) * comb(n, successes))


@lru_cache(maxsize=4096)
def least_successes(n: int, threshold: Fraction) -> int | None:
    """The fewest successes among ``n`` whose E+ reaches ``threshold``; None if not even n do.

    E+ rises in the successes (each L_n(p) does for p >= 1/2), so the answer is a bisection.
    """
    if e_value(n, n) < threshold:
        return None
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        if e_value(n, middle) >= threshold:
            high = middle
        else:
            low = middle + 1
    return low


@lru_cache(maxsize=1024)
def _needed(multiplicity: int, alpha: float, most: int) -> tuple[int, ...]:
    """:func:`least_successes` at multiplicity / alpha of 0 .. ``most`` values; n + 1 where not even all n do.

    To hold a count against a table of integers says the same as to hold E+ against the threshold, since E+
    rises in the count; it is what makes reading a study of 100,000 rounds a matter of a second.
    """
    threshold = _claim_at(multiplicity, alpha)
    found = (least_successes(n, threshold) for n in range(most + 1))
    return tuple(n + 1 if least is None else least for n, least in enumerate(found))


@cache
def _claim_at(multiplicity: int, alpha: float) -> Fraction:
    """A fraction costs more to make than to compare, and each round of each route is compared."""
    return multiplicity / Fraction(repr(alpha))


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a candidate's test stands after its values were read in order.

    ``n`` counts the values read, ``above`` and ``below`` those strictly past the threshold on either side;
    reading stops at the value that makes the state final. ``e_plus`` and ``e_minus`` are at that point.
    """

    state: State
    n: int
    above: int
    below: int
    e_plus: Fraction
    e_minus: Fraction


@dataclass(frozen=True, slots=True)
class SignTest:
    """The test of one study: chosen when the study is created, stored with it, and never changed.

    Attributes:
        margin: a claim says "more than 1 + margin times faster".
        multiplicity: N, all the claims the study could make: cells x candidates x engines x objectives.
        alpha: the chance that *any* of the N claims is false, at most (a union bound).
        drop_at: E- at which a candidate is given up.
        max_rounds: rounds after which an open test is exhausted.
        unit: what one value is; a block uses up 4 rounds.

    Raises:
        ValueError: a value makes no sense.
    """

    margin: float
    multiplicity: int
    alpha: float = 0.05
    drop_at: int = DROP_AT
    max_rounds: int = MAX_ROUNDS
    unit: Unit = Unit.ROUND

    def __post_init__(self) -> None:
        if not (isfinite(self.margin) and self.margin >= 0.0):
            raise ValueError(f"margin must be a number of at least 0, not {self.margin!r}")
        if not isinstance(self.multiplicity, int) or self.multiplicity < 1:
            raise ValueError(f"multiplicity must be a positive integer, not {self.multiplicity!r}")
        if not 0.0 < self.alpha < 1.0:
            raise ValueError(f"alpha must lie between 0 and 1, not {self.alpha!r}")
        if self.drop_at < 2 or self.max_rounds < 1:
            raise ValueError("drop_at must be at least 2 and max_rounds at least 1")

    @property
    def claim_at(self) -> Fraction:
        """N / alpha, with alpha as it is written (0.05 is 1/20, not its binary neighbour)."""
        return _claim_at(self.multiplicity, self.alpha)

    @property
    def cap(self) -> int:
        """Values after which an open test is exhausted."""
        return self.max_rounds // self.unit.rounds

    def state(self, n: int, above: int, below: int) -> State:
        """The state after ``n`` values at this very look.

        A caller that continues after a claim must keep the earlier claim: see :meth:`follow`.

        Raises:
            ValueError: counts are negative or above + below > n.
        """
        if min(n, above, below) < 0 or above + below > n:
            raise ValueError(f"impossible counts: {above} above and {below} below of {n}")
        if e_value(n, above) >= self.claim_at:
            return State.CLAIM
        if e_value(n, below) >= self.drop_at:
            return State.DROP
        return State.CONTINUE if n < self.cap else State.EXHAUSTED

    def hopeless(self, progress: Progress, left: int) -> bool:
        """Whether an open test can claim no more, though all of ``left`` further values were above.

        E+ does not sink at an "above" (the mean of its two next values is its value now, and the one after an
        "above" is the larger), so it is highest when all of them have come. Stopping here is a stop like any
        other: it can only leave a claim unmade.
        """
        n = progress.n + left
        needed = least_successes(n, self.claim_at)
        return not progress.state.final and (needed is None or progress.above + left < needed)

    def follow(self, ratios: Iterable[float]) -> Progress:
        """Read the values in order and stop at the first final state, as Ville's inequality allows.

        Values after it are ignored: a claim once made stands, and a dropped candidate stays dropped, so
        rounds that a resumed or longer study adds cannot turn an answer round.
        """
        threshold = 1.0 + self.margin
        cap = self.cap
        claims, drops = _needed(self.multiplicity, self.alpha, cap), _needed(self.drop_at, 1.0, cap)
        n = above = below = 0
        state = self.state(0, 0, 0)
        for ratio in ratios:
            if state.final:
                break
            n += 1
            above += ratio > threshold
            below += ratio < threshold
            # as `state` says it; its fractions would be compared for each round of each route
            if above >= claims[n]:
                state = State.CLAIM
            elif below >= drops[n]:
                state = State.DROP
            elif n >= cap:
                state = State.EXHAUSTED
        return Progress(state, n, above, below, e_value(n, above), e_value(n, below))

    def lower_bound(self, ratios: Sequence[float]) -> float | None:
        """:func:`lower_bound` at this test's multiplicity and alpha, over at most its cap of values."""
        return lower_bound(ratios[: self.cap], self.multiplicity, self.alpha)


def lower_bound(ratios: Sequence[float], multiplicity: int, alpha: float = 0.05) -> float | None:
    """A lower confidence bound of the median ratio; valid at any stop and for all N cells at once.

    It inverts the test: the supremum of the thresholds t that E+ has rejected after some number of values.
    With s the fewest successes that reach N / alpha among n values, the thresholds rejected at n are those
    under the s-th largest of the n ratios; the bound is the largest of these over all n so far. Hence the
    bound exceeds 1 + margin exactly where a test with that margin (and no drop) claims.

    **What it is valid for.** If t* bounds the conditional median of every round from above (t* is the
    median itself where rounds do not drift), the chance that the bound ever exceeds t* is at most
    alpha / N; so all bounds of a table hold together with probability 1 - alpha, and the claims are among
    them: no further correction. It bounds the *median of the paired ratio in this process on this
    machine*, not the mean, not the best, and not the shift between processes. Just after a claim it lies
    just past the margin wherever the rounds straddle the margin: it is a bound, not an estimate.

    Returns:
        None while no threshold can have been rejected (too few values for N).

    Raises:
        ValueError: a ratio is not finite and positive.
    """
    if bad := [ratio for ratio in ratios if not (isfinite(ratio) and ratio > 0.0)]:
        raise ValueError(f"a ratio must be finite and positive, not {bad[0]!r}")
    needed = _needed(multiplicity, alpha, len(ratios))
    # the first number of values that could have rejected anything
    first = next((n for n, least in enumerate(needed) if n > 0 and least <= n), None)
    if first is None:
        return None
    ordered = sorted(ratios[:first])
    best = ordered[first - needed[first]]
    for n in range(first + 1, len(ratios) + 1):
        insort(ordered, ratios[n - 1])
        if needed[n] <= n:
            best = max(best, ordered[n - needed[n]])
    return best
