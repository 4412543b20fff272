"""Tau: the rank that bounds the median shift, and what it does with few, wild and many cells."""

from __future__ import annotations

from math import comb, exp, pi
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.bench.eprocess import SignTest, lower_bound
from autotune.bench.shift import MIN_CELLS, MOST, rank, shift, tau_of
from autotune.domain.margin import margin_of, near_until


def cells(*shifts: float) -> dict[str, list[float]]:
    return {str(i): [value] for i, value in enumerate(shifts)}


def test_the_rank_is_the_least_whose_value_bounds_the_median() -> None:
    assert [rank(k) for k in (5, 6, 7, 8, 12, 16, 24)] == [5, 6, 7, 7, 10, 12, 17]
    for k in range(MIN_CELLS, 200):
        tail = sum(comb(k, j) for j in range(rank(k), k + 1))
        assert 20 * tail <= 2**k < 20 * (tail + comb(k, rank(k) - 1))
    with pytest.raises(ValueError, match="at least 5 do"):
        rank(4)


def test_a_shift_has_no_direction() -> None:
    assert shift([1.0, 1.1, 1.2], [1.1]) == 0.0
    assert shift([1.0], [exp(0.02)]) == pytest.approx(0.02)
    assert shift([exp(0.02)], [1.0]) == pytest.approx(0.02)


def test_the_noise_of_the_medians_is_taken_out() -> None:
    # a spread of 0.01 / 0.6745 about each median: its variance is pi / 2 of that squared over 5
    five = [exp(value) for value in (-0.02, -0.01, 0.0, 0.01, 0.02)]
    moved = [ratio * exp(0.05) for ratio in five]
    error = 2 * (pi / 2) * (0.01 / 0.6745) ** 2 / 5
    assert shift(five, moved) == pytest.approx((0.05**2 - 0.6745**2 * error) ** 0.5, rel=1e-4)
    assert shift(five, [ratio * exp(0.005) for ratio in five]) == 0.0


def test_noise_alone_makes_less_tau_than_it_is_and_a_shift_under_noise_is_bounded() -> None:
    rng = Random(17)

    def study(true: float, noise: float, rounds: int) -> float:
        shifts = {}
        for cell in range(24):
            there = rng.gauss(0.0, true)
            one = [exp(rng.gauss(0.0, noise)) for _ in range(rounds)]
            two = [exp(there + rng.gauss(0.0, noise)) for _ in range(rounds)]
            shifts[str(cell)] = [shift(one, two)]
        found = tau_of(shifts)
        assert found is not None
        return found

    error = (2 * pi / 2 * 0.03**2 / 32) ** 0.5  # of the difference of two medians: 0.94 %
    assert median(study(0.0, 0.03, 32) for _ in range(60)) < 0.9 * error
    true = 0.6745 * 0.01
    below = sum(study(0.01, 0.03, 32) < true for _ in range(300))
    assert below <= 0.08 * 300  # 5 % stated; 8 % is 2.4 deviations of 300 more


def test_too_few_cells_say_nothing_however_many_candidates_they_have() -> None:
    assert tau_of({}) is None
    assert tau_of(cells(0.1, 0.1, 0.1, 0.1)) is None
    assert tau_of({str(i): [0.01] * 9 for i in range(4)}) is None
    assert tau_of({**cells(0.1, 0.1, 0.1, 0.1), "empty": []}) is None
    assert tau_of(cells(0.01, 0.02, 0.03, 0.01, 0.01)) == 0.03


def test_one_wild_cell_of_eight_and_seven_of_24_do_not_move_it() -> None:
    assert tau_of(cells(*[0.01] * 7, 0.3)) == 0.01
    assert tau_of(cells(*[0.01] * 6, 0.3, 0.3)) == 0.3
    assert tau_of(cells(*[0.01] * 17, *[0.3] * 7)) == 0.01
    assert tau_of(cells(*[0.01] * 16, *[0.3] * 8)) == 0.3


def test_candidates_of_one_cell_are_no_more_evidence_than_one() -> None:
    one = tau_of(cells(0.01, 0.02, 0.03, 0.04, 0.05))
    two = tau_of({str(i): [i / 100, i / 100] for i in range(1, 6)})
    assert one == two == 0.05


def test_it_is_rounded_up_never_nothing_and_never_past_its_most() -> None:
    assert tau_of(cells(*[0.0] * 5)) == 0.0001
    assert tau_of(cells(*[0.01001] * 5)) == 0.0101
    assert tau_of(cells(*[0.0123] * 5)) == 0.0123
    assert tau_of(cells(*[2.0] * 5)) == MOST
    assert margin_of(0.05, MOST) < 1.0


def test_it_bounds_the_median_shift_as_often_as_it_says() -> None:
    rng, below = Random(5), {6: 0, 24: 0}
    true = 0.6745 * 0.01  # the median of |normal|
    for k in below:
        for _ in range(2000):
            found = tau_of(cells(*(abs(rng.gauss(0.0, 0.01)) for _ in range(k))))
            assert found is not None
            below[k] += found < true
    assert below[6] <= 0.03 * 2000  # 1/64
    assert below[24] <= 0.05 * 2000


def test_the_margin_is_the_floor_or_three_taus() -> None:
    assert margin_of(0.02, None) == margin_of(0.02, 0.005) == 0.02
    assert margin_of(0.02, 0.0123) == 0.0369
    assert near_until(0.02, None) == 1.02
    assert near_until(0.02, 0.005) == pytest.approx(1.035)
    assert near_until(0.02, 0.02) == pytest.approx(1.12)


@given(st.lists(st.floats(0.7, 1.5), max_size=80), st.integers(1, 100), st.floats(0.0, 0.3))
@settings(max_examples=150, deadline=None)
def test_a_margin_chosen_after_the_rounds_claims_only_what_the_bound_bears(
    ratios: list[float], multiplicity: int, margin: float
) -> None:
    """The event that any claim is false is the bound's, whoever chose the margin; a drop only takes away."""
    bound = lower_bound(ratios, multiplicity)
    claims = SignTest(margin, multiplicity, drop_at=10**40).follow(ratios).state.value == "claim"
    assert claims == (bound is not None and bound > 1.0 + margin)
    if SignTest(margin, multiplicity).follow(ratios).state.value == "claim":
        assert claims


def test_a_margin_fitted_to_the_rounds_is_false_no_more_often_than_alpha() -> None:
    """True median 1.05. The margin is moved to just under the bound after every cell's rounds are seen: the
    worst that any choice can do. False is a claim of more than 1.05."""
    rng, false, studies = Random(11), 0, 400
    for _ in range(studies):
        ratios = [1.05 * exp(rng.gauss(0.0, 0.03)) for _ in range(128)]
        bound = lower_bound(ratios, 1)
        assert bound is not None and bound <= max(ratios)
        test = SignTest(max(0.0, bound - 1.0 - 1e-9), 1, drop_at=10**30)
        assert test.follow(ratios).state.value == "claim"
        false += bound > 1.05
    assert false <= 0.05 * studies
    assert median(ratios) == pytest.approx(1.05, rel=0.02)
