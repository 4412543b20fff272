"""``false_claims.py --recorded``: exact where it can be; dependence shows where it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autotune.bench.eprocess import SignTest, State
from benchmarks import false_claims
from tests.benchmarks.test_noise_report import recordings, written


def test_exactly_half_of_a_series_lies_above_the_margin() -> None:
    for n in (24, 25):
        centred = false_claims.at_the_margin(np.random.default_rng(n).standard_normal(n) + 3.0)
        assert len(centred) == 24
        assert (centred > 0).sum() == (centred < 0).sum() == 12


def test_the_thresholds_are_the_package_s_own_rule() -> None:
    rng = np.random.default_rng(4)
    signs = np.sign(rng.standard_normal((300, 128)) + 0.2).astype(np.int8)
    above = (signs > 0).cumsum(axis=1, dtype=np.uint8)
    found = false_claims.claimed(signs, above, *false_claims.thresholds(7, 128))
    test = SignTest(margin=0.0, multiplicity=7)
    assert [test.follow(np.exp(row)).state is State.CLAIM for row in signs] == found.tolist()
    assert 0 < found.sum() < 300


def test_block_lengths() -> None:
    assert false_claims.block_length(0.0, 100) == false_claims.LEAST_BLOCK
    assert false_claims.block_length(0.5, 100) == 6
    assert false_claims.block_length(-0.5, 100) == 6


def test_independent_rounds_keep_what_is_stated_and_a_drift_does_not() -> None:
    rng = np.random.default_rng(6)
    white = [false_claims.at_the_margin(rng.standard_normal(128)) for _ in range(20)]
    kept = false_claims.resample(white, 1_000, 1, seed=1)
    assert 0.0 < kept.single < 0.05
    assert kept.broken < 0.05 + 3 * (0.05 * 0.95 / 1_000) ** 0.5
    assert kept.naive["median10"] > 0.4
    steps = [false_claims.at_the_margin(values + np.repeat([0.0, 3.0], 64)) for values in white]
    stepped = false_claims.resample(steps, 1_000, 16, seed=1)
    assert stepped.broken > 0.3
    assert 0.0 < stepped.stands < stepped.broken  # a second process takes claims away
    assert (stepped.agreed <= stepped.claims).all()
    assert kept.stands <= kept.broken


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(written(tmp_path / "rounds.jsonl", recordings(4)))
    assert false_claims.main(["--recorded", source, "--tables", "50"]) == 0
    out = capsys.readouterr().out
    assert "4 series of at least 24 rounds" in out
    assert "shuffled" in out and "median of 10 rounds" in out
    assert false_claims.main(["--recorded", source, "--least", "100"]) == 1
    assert "no cell has 100 rounds" in capsys.readouterr().err
