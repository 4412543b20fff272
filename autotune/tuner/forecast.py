"""How much faster a candidate will be in cells that nobody has timed: a ridge regression on log time.

Both routes of a pair are timed in the same cells. On one design the difference of two ridge fits is the ridge
fit of the differences, so each pair is fitted once, on log time(fallback) - log time(candidate): what slows
both down in a cell cancels, and the residual variance is the ratio's own.

With rows x, penalty l and A = X'X + l I, under the prior "each weight is normal with variance s^2 / l, and
s^2 was seen to be sd^2 in `weight` values":

    mean = x A^-1 X'y        s^2 = (weight sd^2 + |y - Xb|^2 + l |b|^2) / (weight + n)
    variance of a new value = s^2 (1 + x A^-1 x')

A forecast orders work. It decides no answer: that is left to proofs and rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import erf, exp, log2, pi, sqrt
from typing import TYPE_CHECKING

import numpy as np

from autotune.tuner.cost import seen_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from autotune.domain.cell import Cell

    Array = NDArray[np.float64]

# Weights of features of size one; with SD it makes a ratio of an untimed pair uncertain by a factor of three.
PENALTY = 0.1
# What the features do not explain, until cells have been timed. The H200's ratios lie between 0.5 and 6.
SD = 0.2
WEIGHT = 3.0
# Decode kernels choose their tile by query rows a KV head: FlashInfer's selector has these upper ends.
TILES = (8, 16, 32, 64)


def expected_gain(mean: float, variance: float, threshold: float) -> float:
    """E[max(0, g - threshold)] for g normal: what a cell gains if it is won, and 0 if it is not.

    Args:
        mean, variance: of the log ratio g.
        threshold: log(1 + margin).
    """
    sd = sqrt(variance)
    over = mean - threshold
    if sd == 0.0:
        return max(0.0, over)
    z = over / sd
    return sd * exp(-z * z / 2) / sqrt(2 * pi) + over * normal_cdf(z)


def normal_cdf(z: float) -> float:
    """P(Z <= z) of a standard normal."""
    return (1 + erf(z / sqrt(2))) / 2


class Features:
    """Cells as rows of numbers of about size one.

    Log2 of batch and KV length, their squares and product; the tile that q_len x group falls into and the
    dtypes, one column each; log2 of KV heads, head_dim and group.

    Args:
        cells: all that rows will be asked for; they say which dtypes there are.
    """

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._dtypes = sorted({self._dtype(cell) for cell in cells})

    @staticmethod
    def _dtype(cell: Cell) -> tuple[str, ...]:
        return tuple(str(part) for part in cell.column.dtypes.to_dict().values())

    def row(self, cell: Cell) -> list[float]:
        """One cell's features, the constant first."""
        column = cell.column
        shape = column.shape
        group = shape.num_qo_heads / shape.num_kv_heads
        batch = (log2(column.batch_size) - 3) / 4
        kv = (log2(seen_tokens(column, cell.kv_high)) - 12) / 4
        tile = sum(column.q_len * group > end for end in TILES)
        dtype = self._dtype(cell)
        return [
            1.0,
            batch,
            kv,
            batch * batch,
            kv * kv,
            batch * kv,
            *(float(tile == place) for place in range(len(TILES) + 1)),
            *(float(dtype == known) for known in self._dtypes),
            log2(shape.num_kv_heads) / 3,
            log2(shape.head_dim / 128),
            log2(group) / 4,
        ]

    @property
    def width(self) -> int:
        """Numbers a row."""
        return 9 + len(TILES) + 1 + len(self._dtypes)

    def rows(self, cells: Sequence[Cell]) -> Array:
        """One row a cell."""
        return np.array([self.row(cell) for cell in cells], dtype=np.float64)


class Ridge:
    """A fit; see the module's formulas.

    Args:
        rows: n x width; n may be 0.
        values: n.
    """

    def __init__(
        self, rows: Array, values: Array, *, penalty: float = PENALTY, sd: float = SD, weight: float = WEIGHT
    ) -> None:
        a = rows.T @ rows + penalty * np.eye(rows.shape[1])
        self._inverse = np.linalg.inv(a)
        self.weights: Array = self._inverse @ (rows.T @ values)
        left = values - rows @ self.weights
        lost = float(left @ left + penalty * (self.weights @ self.weights))
        self.variance = (weight * sd * sd + lost) / (weight + len(values))

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Mean and variance of a new value at each row."""
        spread = np.einsum("ij,jk,ik->i", rows, self._inverse, rows)
        return rows @ self.weights, self.variance * (1 + spread)
