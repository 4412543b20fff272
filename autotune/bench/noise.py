"""Noise of paired rounds: does one round tell about the next, how wide are the log ratios?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log
from statistics import fmean, median_low, quantiles

# Past this pooled autocorrelation the test's unit is a block of 4 rounds instead of a round.
AUTOCORRELATION_LIMIT = 0.2


def pooled_lag1(series: Sequence[Sequence[float]]) -> float:
    """Lag-1 autocorrelation pooled over several series, each centred on its own mean.

    A short series leans to -1/n, since its mean is estimated from it; the numerator is corrected for that,
    so white noise of any length gives 0 on average. Series of fewer than 3 values or without any spread
    say nothing and are left out.

    Args:
        series: log ratios, one sequence per cell and candidate, in round order.

    Returns:
        About -1 .. 1; 0.0 if no series says anything.
    """
    together = spread = 0.0
    for values in series:
        if len(values) < 3:
            continue
        mean = fmean(values)
        centred = [value - mean for value in values]
        squares = sum(value * value for value in centred)
        together += sum(a * b for a, b in pairwise(centred)) + squares / len(values)
        spread += squares
    return together / spread if spread > 0.0 else 0.0


def block_medians(ratios: Sequence[float], size: int = 4) -> list[float]:
    """Low median of each full block of ``size`` consecutive ratios; an incomplete last block waits.

    The *low* median, so that a block counts as above a threshold only if more than half of its rounds do.
    The mean of the middle two would be above a threshold in 11 of 16 blocks where a skewed ratio is above
    it in every second round.
    """
    return [median_low(ratios[start : start + size]) for start in range(0, len(ratios) - size + 1, size)]


def log_spread(ratios: Sequence[float]) -> float:
    """Robust standard deviation of the log ratios: the middle half's width over 1.349 (normal: sigma)."""
    if len(ratios) < 2:
        return 0.0
    low, _, high = quantiles([log(ratio) for ratio in ratios], n=4, method="inclusive")
    return (high - low) / 1.349


def central_interval(ratios: Sequence[float], share: float = 0.9) -> tuple[float, float]:
    """The two ratios between which the central ``share`` of them lies, interpolated on a log scale.

    Raises:
        ValueError: no ratios.
    """
    if not ratios:
        raise ValueError("no ratios")
    logs = sorted(log(ratio) for ratio in ratios)

    def at(level: float) -> float:
        position = level * (len(logs) - 1)
        index = min(int(position), len(logs) - 2) if len(logs) > 1 else 0
        upper = logs[min(index + 1, len(logs) - 1)]
        return exp(logs[index] + (position - index) * (upper - logs[index]))

    return at((1 - share) / 2), at((1 + share) / 2)
