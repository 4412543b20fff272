"""Tau: how far a paired ratio moves from one process to the next, which no single process can see.

A cell is timed again in a fresh child. The shift of a candidate there is |log(median ratio in the second
process / median ratio in the first)|; 0.01 is 1 %.

**The scale.** Tau is an upper 95 % confidence bound of the *median* shift: of k cells' shifts the r-th
smallest, r the least rank with P(Binomial(k, 1/2) >= r) <= 5 %. (It lies under the median only if r of them
or more do.) Nothing is assumed about how shifts are distributed. It is the largest of 5 to 7, the second
largest of 8, the 17th of 24, and comes down to the median as cells are added: conservative where they are
few. For normal shifts the 17th of 24 lies at their standard deviation, so that 3 tau is three of these; seven
wild cells of the 24 do not move it.

**The noise of the two medians** is taken out of each shift before the rank is. With noise of standard error e
on top of a shift whose standard deviation is t, the median of |s| is c sqrt(t^2 + e^2), c = 0.6745; so s
counts as sqrt(s^2 - c^2 e^2), and as 0 where it is less than noise alone would make it. The rank then bounds
c t as it bounds the median of noiseless shifts. This step does assume normal shifts and medians; e comes from
the median absolute deviation within each process, and where rounds resemble their neighbours it is too small:
tau is larger then, never smaller. Where shifts are nothing but noise, three quarters of it stay in tau.

Shifts of several candidates in one cell share that cell's processes: they are pooled, and the rank is taken
from the number of cells. Cells that were re-timed in one child share that child too, which the bound does not
see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil, comb, log, pi, sqrt
from statistics import median

# Fewer cells admit no 95 % bound at all: P(Binomial(4, 1/2) = 4) is 6 %.
MIN_CELLS = 5
# Tables and decisions use tau in steps of 0.01 %, rounded up, and never 0.0: in older tables that means "not
# measured". Past a third the margin would be a factor of two: there is no use in telling more apart.
STEP = 1e-4
MOST = 0.33


# The median of |X| for a standard normal X.
_HALF = 0.6744897501960817


def shift(first: Sequence[float], second: Sequence[float]) -> float:
    """|log(median(second) / median(first))| of positive ratios, less the noise of the medians.

    Raises:
        statistics.StatisticsError: one of them is empty.
    """
    moved = log(median(second) / median(first))
    noise = sum(_variance([log(ratio) for ratio in each]) for each in (first, second))
    return sqrt(max(0.0, moved**2 - _HALF**2 * noise))


def _variance(values: Sequence[float]) -> float:
    """Of the median of normal values: pi / 2 of the mean's; their own from the median absolute deviation."""
    middle = median(values)
    spread = median(abs(value - middle) for value in values) / _HALF
    return pi / 2 * spread**2 / len(values)


@cache
def rank(cells: int) -> int:
    """The rank among ``cells`` shifts whose value bounds their median from above with 95 % confidence.

    Raises:
        ValueError: fewer than :data:`MIN_CELLS`.
    """
    if cells < MIN_CELLS:
        raise ValueError(f"{cells} cells bound no median; at least {MIN_CELLS} do")
    tail = 0
    for least in range(cells, 0, -1):
        tail += comb(cells, least)
        if 20 * tail > 2**cells:
            return least + 1
    raise AssertionError("the whole distribution is more than 5 %")


def tau_of(shifts: Mapping[str, Sequence[float]]) -> float | None:
    """Tau of the shifts of each re-timed cell, one a candidate; None while fewer than 5 cells have any."""
    cells = [each for each in shifts.values() if each]
    if len(cells) < MIN_CELLS:
        return None
    pooled = sorted(value for each in cells for value in each)
    value = pooled[ceil(len(pooled) * rank(len(cells)) / len(cells)) - 1]
    # the second ceil's grace: a value that is a step but for its last bit stays that step
    return min(MOST, round(max(1, ceil(value / STEP - 1e-9)) * STEP, 4))
