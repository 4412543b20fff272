from __future__ import annotations

from random import Random

import pytest

from autotune.bench.noise import block_medians, central_interval, log_spread, pooled_lag1


def autoregressive(rho: float, n: int, rng: Random) -> list[float]:
    value, out = rng.gauss(0, 1), []
    for _ in range(n):
        value = rho * value + (1 - rho * rho) ** 0.5 * rng.gauss(0, 1)
        out.append(value)
    return out


def test_lag1_of_white_noise_is_zero_even_in_short_series() -> None:
    rng = Random(7)
    series = [[rng.gauss(5.0 * i, 1.0) for _ in range(12)] for i in range(2000)]
    # uncorrected it would be -1/12 = -0.083
    assert abs(pooled_lag1(series)) < 0.02


@pytest.mark.parametrize("rho", [0.3, 0.6, -0.4])
def test_lag1_finds_a_known_dependence(rho: float) -> None:
    rng = Random(11)
    series = [autoregressive(rho, 128, rng) for _ in range(150)]
    assert pooled_lag1(series) == pytest.approx(rho, abs=0.04)


def test_lag1_ignores_series_that_say_nothing() -> None:
    assert pooled_lag1([]) == 0.0
    assert pooled_lag1([[1.0, 2.0], [3.0] * 10]) == 0.0


def test_blocks_take_the_low_median_and_wait_for_four() -> None:
    assert block_medians([4.0, 1.0, 3.0, 2.0, 9.0, 9.0, 9.0]) == [2.0]
    assert block_medians([1.0, 1.0, 9.0, 9.0]) == [1.0]  # half above is not above
    assert block_medians([1.0, 9.0, 9.0, 9.0]) == [9.0]
    assert block_medians([1.0, 2.0, 3.0]) == []


def test_spread_is_the_normal_sigma_and_shrugs_off_spikes() -> None:
    rng = Random(3)
    ratios = [2.718281828459045 ** rng.gauss(0.1, 0.03) for _ in range(4000)]
    assert log_spread(ratios) == pytest.approx(0.03, rel=0.06)
    assert log_spread(ratios[:3960] + [50.0] * 40) == pytest.approx(0.03, rel=0.08)
    assert log_spread([1.0]) == 0.0


def test_central_interval() -> None:
    assert central_interval([1.0]) == (1.0, 1.0)
    low, high = central_interval([0.5, 1.0, 2.0], 1.0)
    assert (low, high) == pytest.approx((0.5, 2.0))
    low, high = central_interval([0.5, 1.0, 2.0], 0.5)
    assert (low, high) == pytest.approx((2**-0.5, 2**0.5))
    with pytest.raises(ValueError, match="no ratios"):
        central_interval([])
