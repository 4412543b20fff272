from __future__ import annotations

from fractions import Fraction
from math import comb
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.bench.eprocess import SignTest, State, Unit, e_value, least_successes, lower_bound

RATIOS = st.lists(st.floats(0.5, 2.0, allow_nan=False), max_size=60)


def mixture(n: int, s: int) -> Fraction:
    """The integral of 2 (2p)^s (2-2p)^(n-s) over [1/2, 1], term by term: nothing shared with the code."""
    total = Fraction(0)
    for k in range(n - s + 1):  # (1-p)^(n-s) expanded; antiderivative of p^(s+k)
        power = s + k + 1
        term = (1 - Fraction(1, 2) ** power) / power
        total += (-1) ** k * comb(n - s, k) * term
    return Fraction(2 ** (n + 1)) * total


def test_e_value_is_the_uniform_mixture_over_p_from_one_half_to_one() -> None:
    for n in range(25):
        for s in range(n + 1):
            assert e_value(n, s) == mixture(n, s)


@given(st.integers(0, 127), st.data())
@settings(deadline=None)
def test_martingale_at_one_half_exactly_and_supermartingale_below(n: int, data: st.DataObject) -> None:
    s = data.draw(st.integers(0, n))
    up, same, now = e_value(n + 1, s + 1), e_value(n + 1, s), e_value(n, s)
    assert (up + same) / 2 == now
    u = data.draw(st.fractions(0, Fraction(1, 2)))
    assert u * up + (1 - u) * same <= now


def test_ville_bound_by_full_enumeration() -> None:
    """P(E+ ever reaches 1/alpha) for a fair coin, by exact dynamic programming over 128 rounds."""
    for threshold in (Fraction(20), Fraction(1000)):
        alive = {0: Fraction(1)}
        hit = Fraction(0)
        for n in range(1, 129):
            following: dict[int, Fraction] = {}
            for s, weight in alive.items():
                for t in (s, s + 1):
                    if e_value(n, t) >= threshold:
                        hit += weight / 2
                    else:
                        following[t] = following.get(t, Fraction(0)) + weight / 2
            alive = following
        assert hit + sum(alive.values()) == 1
        assert 0 < hit <= 1 / threshold


def test_e_value_known_points_and_bad_counts() -> None:
    assert e_value(0, 0) == 1
    assert e_value(13, 13) == Fraction(2**14 - 1, 14)
    assert e_value(7, 7) == Fraction(255, 8)
    with pytest.raises(ValueError, match=r"0\.\.3, not 4"):
        e_value(3, 4)


@given(st.integers(1, 128), st.integers(1, 10_000))
@settings(deadline=None)
def test_least_successes_is_the_least(n: int, threshold: int) -> None:
    needed = least_successes(n, Fraction(threshold))
    reached = [s for s in range(n + 1) if e_value(n, s) >= threshold]
    assert needed == (min(reached) if reached else None)


def test_states_at_their_edges() -> None:
    test = SignTest(margin=0.05, multiplicity=50)
    assert test.claim_at == 1000
    assert test.state(12, 12, 0) is State.CONTINUE  # 8191 / 13 = 630
    assert test.state(13, 13, 0) is State.CLAIM  # 16383 / 14 = 1170
    assert test.state(6, 0, 6) is State.CONTINUE  # 127 / 7 = 18.1
    assert test.state(7, 0, 7) is State.DROP  # 255 / 8 = 31.9
    assert test.state(128, 64, 64) is State.EXHAUSTED
    assert test.state(127, 64, 63) is State.CONTINUE
    with pytest.raises(ValueError, match="impossible counts"):
        test.state(5, 3, 3)


def test_ties_count_against_the_claim_and_are_no_reason_to_drop() -> None:
    test = SignTest(margin=0.25, multiplicity=1)
    tied = test.follow([1.25] * 200)
    assert (tied.state, tied.n, tied.above, tied.below) == (State.EXHAUSTED, 128, 0, 0)
    assert test.follow([1.2500001] * 200).state is State.CLAIM


def test_a_claim_once_made_stands() -> None:
    test = SignTest(margin=0.05, multiplicity=1)
    first = test.follow([1.2] * 7)
    assert first.state is State.CLAIM
    assert test.follow([1.2] * 7 + [0.5] * 100) == first
    dropped = test.follow([0.9] * 7)
    assert dropped.state is State.DROP
    assert test.follow([0.9] * 7 + [2.0] * 100) == dropped


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.01, 1e-5])
def test_alpha_is_the_decimal_that_was_written(alpha: float) -> None:
    assert SignTest(0.0, 3, alpha=alpha).claim_at == 3 * round(1 / alpha)


@pytest.mark.parametrize(
    "values",
    [
        {"margin": -0.1},
        {"margin": float("nan")},
        {"multiplicity": 0},
        {"alpha": 0.0},
        {"alpha": 1.0},
        {"drop_at": 1},
        {"max_rounds": 0},
    ],
)
def test_senseless_settings_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        SignTest(**{"margin": 0.05, "multiplicity": 1, **values})  # type: ignore[arg-type]


@given(RATIOS, st.integers(1, 200), st.sampled_from([0.0, 0.02, 0.05]))
@settings(max_examples=150, deadline=None)
def test_bound_passes_the_margin_exactly_where_the_test_claims(
    ratios: list[float], multiplicity: int, margin: float
) -> None:
    # a test that never drops: E- cannot reach this within 60 rounds
    test = SignTest(margin, multiplicity, drop_at=10**30)
    bound = lower_bound(ratios, multiplicity)
    assert (test.follow(ratios).state is State.CLAIM) == (bound is not None and bound > 1.0 + margin)


@given(RATIOS, st.integers(1, 200))
@settings(deadline=None)
def test_bound_never_passes_the_best_ratio_and_never_sinks(ratios: list[float], multiplicity: int) -> None:
    bounds = [lower_bound(ratios[:n], multiplicity) for n in range(len(ratios) + 1)]
    known = [bound for bound in bounds if bound is not None]
    assert known == sorted(known)
    assert all(bound <= max(ratios) for bound in known)
    assert bounds[: len(bounds) - len(known)] == [None] * (len(bounds) - len(known))


def test_bound_is_near_the_median_when_rounds_are_many_and_tight() -> None:
    ratios = [1.5 + 0.001 * ((i * 37) % 11 - 5) for i in range(128)]
    bound = lower_bound(ratios, 50)
    assert bound is not None
    assert median(ratios) - 0.005 < bound <= median(ratios)
    assert SignTest(0.05, 50).lower_bound(ratios * 3) == bound  # no more than the cap is read


def test_bound_refuses_what_is_no_ratio() -> None:
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and positive"):
            lower_bound([1.0, value], 1)


def test_blocks_use_up_four_rounds() -> None:
    assert SignTest(0.05, 1, unit=Unit.BLOCK4).cap == 32
    assert SignTest(0.05, 1).cap == 128


@given(
    st.lists(st.one_of(st.floats(0.9, 1.2), st.just(1.05)), max_size=140),
    st.sampled_from([1, 50, 17280]),
    st.sampled_from([(128, Unit.ROUND), (128, Unit.BLOCK4), (7, Unit.ROUND), (3, Unit.BLOCK4)]),
    st.sampled_from([2, 20]),
)
@settings(deadline=None)
def test_following_is_looking_after_every_value(
    ratios: list[float], multiplicity: int, most: tuple[int, Unit], drop_at: int
) -> None:
    """By the e-values themselves, and by the bound as its definition has it."""
    rounds, unit = most
    test = SignTest(0.05, multiplicity, drop_at=drop_at, max_rounds=rounds, unit=unit)
    n = above = below = 0
    state = test.state(0, 0, 0)
    for ratio in ratios:
        if state.final:
            break
        n, above, below = n + 1, above + (ratio > 1.05), below + (ratio < 1.05)
        state = test.state(n, above, below)
    seen = test.follow(ratios)
    assert (seen.state, seen.n, seen.above, seen.below) == (state, n, above, below)
    assert (seen.e_plus, seen.e_minus) == (e_value(n, above), e_value(n, below))
    rejected = [
        sorted(ratios[:n], reverse=True)[least - 1]
        for n in range(1, len(ratios) + 1)
        if (least := least_successes(n, test.claim_at)) is not None
    ]
    assert lower_bound(ratios, multiplicity) == max(rejected, default=None)
