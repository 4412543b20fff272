"""The simulation of benchmarks/false_claims.py at fixed seeds: the guarantee holds where it is given."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.bench.eprocess import SignTest, State
from benchmarks import false_claims as simulation

CELLS = 3_000


@pytest.fixture(scope="module")
def rates() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = simulation.rates(CELLS, seed=7)
    return found


@pytest.mark.parametrize("noise", ["normal", "volatile", "skewed"])
def test_the_e_process_stays_below_alpha_where_its_assumption_holds(
    rates: dict[str, dict[str, float]], noise: str
) -> None:
    assert 0.0 < rates[noise]["sign"] < 0.05
    assert rates[noise]["sign/N"] <= 0.003  # 0.001 each; 3 standard errors of 3,000 cells
    assert rates[noise]["blocks"] < 0.05


def test_common_rules_do_not(rates: dict[str, dict[str, float]]) -> None:
    for noise in ("normal", "volatile", "skewed"):
        assert rates[noise]["median10"] > 0.4
        assert rates[noise]["t-peek"] > 0.2
    assert rates["skewed"]["t-end"] > 0.9


def test_a_drifting_median_is_outside_the_guarantee_and_the_simulation_says_so(
    rates: dict[str, dict[str, float]],
) -> None:
    assert rates["drifting"]["sign"] > 0.05
    assert rates["drifting"]["blocks"] < rates["drifting"]["sign"] / 2


def test_noise_models_have_their_median_at_the_margin() -> None:
    for name in ("normal", "volatile", "skewed"):
        noise = simulation.NOISES[name](np.random.default_rng(1), 500, 128)
        assert float((noise > 0).mean()) == pytest.approx(0.5, abs=0.01)


def test_vectorised_rule_is_the_package_s_own() -> None:
    excess = simulation.normal(np.random.default_rng(3), 150, 128) + 0.01
    claimed = simulation.sign_claims(excess, 5)
    test = SignTest(margin=0.0, multiplicity=5)
    assert [test.follow(np.exp(row)).state is State.CLAIM for row in excess] == claimed.tolist()
    assert 0 < claimed.sum() < 150


def test_t_points_are_those_of_the_table() -> None:
    for n, point in ((5, 2.132), (10, 1.833), (128, 1.657)):
        assert simulation.t_point(n) == pytest.approx(point, abs=0.02)


def test_the_command_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulation.main(["--quick"]) == 0
    out = capsys.readouterr().out
    assert "2000 cells exactly at the margin" in out
    assert all(name in out for name in (*simulation.NOISES, *simulation.RULES))
