from __future__ import annotations

from dataclasses import replace
from math import exp, log, log1p, pi, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.tuner.forecast import Features, Ridge, expected_gain, normal_cdf

COLUMN = Column(Shape(8, 1, 128, 16), PROFILES["bf16"], 4, 16, 4096)


def test_one_weight_by_hand() -> None:
    # x = 1, 2; y = 3, 5; penalty 1: A = 1 + 4 + 1 = 6, b = (3 + 10) / 6
    fit = Ridge(np.array([[1.0], [2.0]]), np.array([3.0, 5.0]), penalty=1.0, sd=0.5, weight=2.0)
    b = 13 / 6
    assert fit.weights == pytest.approx([b])
    variance = (2 * 0.25 + (3 - b) ** 2 + (5 - 2 * b) ** 2 + b * b) / 4
    assert fit.variance == pytest.approx(variance)
    mean, spread = fit.predict(np.array([[1.0], [4.0]]))
    assert mean == pytest.approx([b, 4 * b])
    assert spread == pytest.approx([variance * (1 + 1 / 6), variance * (1 + 16 / 6)])


def test_it_is_the_conditional_of_the_joint_normal() -> None:
    # the same posterior, from the kernel x x' / l of a Gaussian process with unit noise
    rng = np.random.default_rng(3)
    rows, values, new = rng.normal(size=(12, 4)), rng.normal(size=12), rng.normal(size=(5, 4))
    fit = Ridge(rows, values, penalty=0.3, sd=0.2, weight=3.0)
    kernel = rows @ rows.T / 0.3 + np.eye(12)
    cross = new @ rows.T / 0.3
    mean, variance = fit.predict(new)
    assert mean == pytest.approx(cross @ np.linalg.solve(kernel, values))
    free = np.sum(new * new, axis=1) / 0.3 + 1 - np.sum(cross * np.linalg.solve(kernel, cross.T).T, axis=1)
    assert variance == pytest.approx(fit.variance * free)
    assert fit.variance == pytest.approx((3 * 0.04 + values @ np.linalg.solve(kernel, values)) / 15)


def test_the_difference_of_two_fits_is_the_fit_of_the_differences() -> None:
    rng = np.random.default_rng(4)
    rows, slow, fast = rng.normal(size=(20, 3)), rng.normal(size=20), rng.normal(size=20)
    both = Ridge(rows, slow).weights - Ridge(rows, fast).weights
    assert Ridge(rows, slow - fast).weights == pytest.approx(both)


def test_without_data_nothing_is_known() -> None:
    fit = Ridge(np.zeros((0, 2)), np.zeros(0), penalty=0.1, sd=0.2, weight=3.0)
    mean, variance = fit.predict(np.array([[1.0, 0.0]]))
    assert mean == [0.0]
    assert variance == pytest.approx([0.04 * 11])


def test_a_law_is_found() -> None:
    """The decode kernel wins at small batches; a few cells tell which of the others it wins."""
    cells = [
        Cell(replace(COLUMN, batch_size=batch), low, high)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        for low, high in ((4, 256), (257, 1024), (1025, 4096))
    ]
    features = Features(cells)

    def truth(cell: Cell) -> float:
        return 1.2 - 0.3 * log(cell.column.batch_size) + 0.1 * log(cell.kv_high / 256)

    seen, unseen = cells[::3], [cell for i, cell in enumerate(cells) if i % 3]
    fit = Ridge(features.rows(seen), np.array([truth(cell) for cell in seen]))
    before = Ridge(features.rows([]).reshape(0, features.width), np.zeros(0))
    means, variances = fit.predict(features.rows(unseen))
    # one KV row only was timed: its slope is not known, and the variance says so
    for cell, mean, variance in zip(unseen, means, variances, strict=True):
        assert abs(mean - truth(cell)) < 3 * sqrt(variance)
    assert float(variances.max()) < float(before.predict(features.rows(unseen))[1].min())


def test_expected_gain_by_hand() -> None:
    # a standard normal past 0: phi(0)
    assert expected_gain(0.0, 1.0, 0.0) == pytest.approx(1 / sqrt(2 * pi))
    assert expected_gain(0.5, 0.0, 0.2) == pytest.approx(0.3)
    assert expected_gain(0.1, 0.0, 0.2) == 0.0
    assert expected_gain(1.0, 1e-8, log1p(0.05)) == pytest.approx(1.0 - log1p(0.05), abs=1e-6)
    assert normal_cdf(1.959963984540054) == pytest.approx(0.975)


@given(st.floats(-2, 2), st.floats(1e-4, 2), st.floats(0, 0.2))
def test_an_expected_gain_is_never_less_than_the_gain_expected(mean: float, sd: float, past: float) -> None:
    gain = expected_gain(mean, sd * sd, past)
    assert gain >= max(0.0, mean - past) - 1e-12
    # the closed form against the sum of a fine grid
    grid = np.linspace(mean - 9 * sd, mean + 9 * sd, 4001)
    density = np.exp(-(((grid - mean) / sd) ** 2) / 2) / (sd * sqrt(2 * pi))
    whole = float(np.sum(np.maximum(0, grid - past) * density) * (grid[1] - grid[0]))
    assert gain == pytest.approx(whole, abs=1e-4)
    assert exp(gain) >= 1.0


def test_features() -> None:
    shape = replace(COLUMN.shape, num_qo_heads=16, num_kv_heads=2)
    cells = [
        Cell(COLUMN, 1025, 4096),
        Cell(replace(COLUMN, dtypes=PROFILES["fp32"]), 1025, 4096),
        Cell(replace(COLUMN, shape=shape, q_len=8), 1025, 4096),
    ]
    features = Features(cells)
    first, second, third = (features.row(cell) for cell in cells)
    assert len(first) == features.width
    assert first[:6] == [1.0, 0.25, 0.0, 0.0625, 0.0, 0.0]
    # 4 x 8 query rows a KV head are the third tile, 8 x 8 the fourth
    assert first[6:11] == [0, 0, 1, 0, 0]
    assert third[6:11] == [0, 0, 0, 1, 0]
    assert first[11:13] == [1, 0] and second[11:13] == [0, 1]
    assert third[13:] == [pytest.approx(1 / 3), 0.0, 0.75]
    # a window bounds what a query reads
    windowed = replace(COLUMN, shape=replace(COLUMN.shape, window_left=124))
    assert features.row(Cell(windowed, 1025, 4096))[2] == pytest.approx((7 - 12) / 4)
