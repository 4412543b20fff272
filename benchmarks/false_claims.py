"""How often is "more than 5 % faster" claimed where it is false? The sign e-process against common rules.

    python benchmarks/false_claims.py [--quick] [--seed N]
    python benchmarks/false_claims.py --recorded SOURCE [--tables 10000] [--block L] [--least N]

Every simulated cell lies exactly at the margin: the median of its paired ratio is 1.05 in each round, so each
claim is a false one. A rule may look after every round, up to 128. The noise models:

* ``normal``: independent, 3 %.
* ``volatile``: calm (1 %) and rough (10 %) spells of about 20 rounds; the median stays where it is.
* ``skewed``: every second ratio is a little low, the others up to 30 % high; the median stays where it is,
  the mean does not: a bound of the mean answers another question.
* ``drifting``: a slow component (lag-1 correlation 0.95, 2 %) on top of 2 % noise moves the median itself for
  many rounds: outside what the test assumes, shown for honesty. Blocks of 4 rounds lessen it, no more.

Rules: ``median10`` claims if the median of the first 10 ratios passes the margin; ``t-peek`` if a 95 %
t-bound of the mean log ratio does at any look from 5 rounds on; ``t-end`` the same at round 128
only; ``sign`` is the e-process at N = 1, ``sign/N`` at N = 50, ``blocks`` the
e-process at N = 1 on low medians of 4.

``--recorded`` takes the noise from recorded rounds (see ``recorded.py``) instead of a model: each cell's log
ratios of each pair of routes, moved so that their median is exactly the margin, are resampled in circular
blocks into series of 128 rounds, one for each table. So every claim of a table is a false one, and any that
is made breaks it. Blocks keep what neighbouring rounds have in common; their length follows from the
autocorrelation that was found, or is given. N is the number of claims that a simulated table can make.
Short series, repeated, resemble themselves: shuffled ones show how much of a result is only that, and
``--least 96`` takes long series alone. A claim at the margin is a near one: "after a second process" counts
those that a second series of 64 rounds, drawn from the same cell, agrees with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log

import numpy as np
from numpy.typing import NDArray

from autotune.bench.eprocess import DROP_AT, MAX_ROUNDS, least_successes
from autotune.tuner.standing import AGREE_ROUNDS
from benchmarks.noise import autocorrelation
from benchmarks.recorded import RecordedError, Recordings, ended, read, table

Array = NDArray[np.float64]
MARGIN = 0.05
ALPHA = 0.05
CELLS = 50
# Standard normal 95 % points corrected for n - 1 degrees of freedom (Cornish-Fisher, two terms): within
# 0.02 of the t table from 5 values on.
Z95 = 1.6448536


def normal(rng: np.random.Generator, cells: int, rounds: int) -> Array:
    return 0.03 * rng.standard_normal((cells, rounds))


def volatile(rng: np.random.Generator, cells: int, rounds: int) -> Array:
    rough = np.empty((cells, rounds), dtype=bool)
    rough[:, 0] = rng.random(cells) < 0.3
    for i in range(1, rounds):
        change = rng.random(cells) < 0.05
        rough[:, i] = np.where(change, rng.random(cells) < 0.3, rough[:, i - 1])
    return np.where(rough, 0.10, 0.01) * rng.standard_normal((cells, rounds))


def skewed(rng: np.random.Generator, cells: int, rounds: int) -> Array:
    high = rng.random((cells, rounds)) < 0.5
    size = rng.random((cells, rounds))
    return np.where(high, 0.30 * size, -0.01 * size)


def drifting(rng: np.random.Generator, cells: int, rounds: int) -> Array:
    noise = 0.02 * rng.standard_normal((cells, rounds))
    level = 0.02 * rng.standard_normal(cells)
    for i in range(rounds):
        level = 0.95 * level + (1 - 0.95**2) ** 0.5 * 0.02 * rng.standard_normal(cells)
        noise[:, i] += level
    return noise


NOISES: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "normal": normal,
    "volatile": volatile,
    "skewed": skewed,
    "drifting": drifting,
}


def sign_claims(excess: Array, multiplicity: int = 1) -> NDArray[np.bool_]:
    """Which cells the e-process claims, and does not drop first. ``excess``: log ratio less log margin."""
    cells, rounds = excess.shape
    claim_at = multiplicity / Fraction(repr(ALPHA))
    above, below = np.cumsum(excess > 0, axis=1), np.cumsum(excess < 0, axis=1)
    claimed = np.zeros(cells, dtype=bool)
    dropped = np.zeros(cells, dtype=bool)
    for n in range(1, rounds + 1):
        claim = least_successes(n, claim_at)
        drop = least_successes(n, Fraction(DROP_AT))
        if claim is not None:
            claimed |= ~dropped & (above[:, n - 1] >= claim)
        if drop is not None:
            dropped |= ~claimed & (below[:, n - 1] >= drop)
    return claimed


def block_claims(excess: Array) -> NDArray[np.bool_]:
    """The e-process on low medians of 4 consecutive rounds."""
    cells, rounds = excess.shape
    blocks = np.sort(excess[:, : rounds // 4 * 4].reshape(cells, -1, 4), axis=2)[:, :, 1]
    return sign_claims(blocks)


def t_point(n: int) -> float:
    """One-sided 95 % point of Student's t with n - 1 degrees of freedom, approximately."""
    nu, z = n - 1, Z95
    return z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)


def t_claims(excess: Array, first: int) -> NDArray[np.bool_]:
    """Cells whose t-bound of the mean is above the margin at any look from ``first`` rounds on."""
    claimed = np.zeros(excess.shape[0], dtype=bool)
    for n in range(first, excess.shape[1] + 1):
        seen = excess[:, :n]
        bound = seen.mean(axis=1) - t_point(n) * seen.std(axis=1, ddof=1) / n**0.5
        claimed |= bound > 0
    return claimed


RULES: dict[str, Callable[[Array], NDArray[np.bool_]]] = {
    "median10": lambda excess: np.median(excess[:, :10], axis=1) > 0,
    "t-peek": lambda excess: t_claims(excess, 5),
    "t-end": lambda excess: t_claims(excess, excess.shape[1]),
    "sign": sign_claims,
    "sign/N": lambda excess: sign_claims(excess, CELLS),
    "blocks": block_claims,
}


def rates(cells: int, seed: int) -> dict[str, dict[str, float]]:
    """False-claim rate by noise model and rule, over ``cells`` cells exactly at the margin."""
    found: dict[str, dict[str, float]] = {}
    for index, (name, noise) in enumerate(NOISES.items()):
        rng = np.random.default_rng([seed, index])
        # log ratio minus log(1 + margin); its median is 0 by construction
        ratios = np.exp(log(1 + MARGIN) + noise(rng, cells, MAX_ROUNDS))
        excess = np.log(ratios) - log(1 + MARGIN)
        found[name] = {rule: float(claims(excess).mean()) for rule, claims in RULES.items()}
    return found


# Cells with fewer rounds say too little about their noise.
LEAST_ROUNDS = 24
LEAST_BLOCK = 4
# So many tables are enough to see the rates of rules that are wrong half of the time.
NAIVE_TABLES = 100


@dataclass(frozen=True)
class Resampled:
    """What false claims a table of resampled cells has.

    Attributes:
        series: claims that a table can make: cells x pairs of routes.
        block: rounds in a block.
        tables: simulated.
        claims: false ones at N = ``series``, by table.
        by_series: the same, by series.
        single: share of false claims at N = 1.
        naive: share of false claims by rule, over fewer tables.
        agreed: of ``claims``, those that a second series of 64 rounds agrees with at N = 1, by table.
    """

    series: int
    block: int
    tables: int
    claims: NDArray[np.int64]
    by_series: NDArray[np.int64]
    single: float
    naive: dict[str, float]
    agreed: NDArray[np.int64]

    @property
    def stands(self) -> float:
        """Share of tables with any false claim that a second series agrees with."""
        return float((self.agreed > 0).mean())

    @property
    def broken(self) -> float:
        """Share of tables with any false claim at N."""
        return float((self.claims > 0).mean())


def at_the_margin(values: Array) -> Array:
    """``values`` less their median, so that exactly half of them lie above 0 and half below.

    An odd one out would lie on it, which counts against a claim: the last value is left out.
    """
    even = values[: len(values) // 2 * 2]
    centred: Array = even - np.median(even)
    return centred


def centred_series(found: Recordings, least: int = LEAST_ROUNDS) -> list[Array]:
    """Of every pair of routes in every recording that has ``least`` rounds."""
    listed = [item.log_ratios(*pair) for item in found.items for pair in found.pairs]
    return [at_the_margin(values) for values in listed if len(values) >= least]


def block_length(lag1: float, rounds: float) -> int:
    """Carlstein's length for a first-order autoregression, (2 r / (1 - r^2))^(2/3) n^(1/3); at least 4."""
    r = min(abs(lag1), 0.99)
    length: float = (2 * r / (1 - r * r)) ** (2 / 3) * rounds ** (1 / 3)
    return max(LEAST_BLOCK, ceil(length))


Counts = NDArray[np.uint8]


def thresholds(multiplicity: int, rounds: int) -> tuple[Counts, Counts]:
    """(claim, drop): fewest rounds above, and below, that end the test at each n; past n where none do."""
    never = rounds + 1
    claim_at = multiplicity / Fraction(repr(ALPHA))
    claim = [least_successes(n, claim_at) for n in range(1, rounds + 1)]
    drop = [least_successes(n, Fraction(DROP_AT)) for n in range(1, rounds + 1)]
    return (
        np.array([never if value is None else value for value in claim], dtype=np.uint8),
        np.array([never if value is None else value for value in drop], dtype=np.uint8),
    )


def claimed(signs: NDArray[np.int8], above: Counts, claim: Counts, drop: Counts) -> NDArray[np.bool_]:
    """Which rows reach a claim before a drop.

    Args:
        signs: +1, 0 or -1, a row a series.
        above: running counts of +1.
    """
    result = np.zeros(len(signs), dtype=bool)
    reached = above >= claim
    rows = np.flatnonzero(reached.any(axis=1))
    if len(rows):
        dropped = (signs[rows] < 0).cumsum(axis=1, dtype=np.uint8) >= drop
        first = reached[rows].argmax(axis=1)
        gone = np.where(dropped.any(axis=1), dropped.argmax(axis=1), signs.shape[1])
        result[rows] = first < gone
    return result


def resample(series: Sequence[Array], tables: int, block: int, seed: int) -> Resampled:
    """Resample every series into one of 128 rounds for each table, and let every rule judge it."""
    rng = np.random.default_rng(seed)
    blocks = ceil(MAX_ROUNDS / block)
    strict = thresholds(len(series), MAX_ROUNDS)
    alone = thresholds(1, MAX_ROUNDS)
    second = thresholds(1, AGREE_ROUNDS)
    claims, agreed = np.zeros(tables, dtype=np.int64), np.zeros(tables, dtype=np.int64)
    by_series = np.zeros(len(series), dtype=np.int64)
    single = 0
    naive: dict[str, list[float]] = {name: [] for name in ("median10", "t-peek", "t-end")}
    for index, values in enumerate(series):
        n = len(values)
        # row s: the block that starts at s, round the end
        windows = values[(np.arange(n)[:, None] + np.arange(block)[None, :]) % n]
        starts = rng.integers(0, n, (tables, blocks))
        of_blocks = np.sign(windows).astype(np.int8)
        signs = of_blocks[starts].reshape(tables, -1)[:, :MAX_ROUNDS]
        above = (signs > 0).cumsum(axis=1, dtype=np.uint8)
        false = claimed(signs, above, *strict)
        claims += false
        by_series[index] = false.sum()
        if hit := np.flatnonzero(false).tolist():
            draw = rng.integers(0, n, (len(hit), ceil(AGREE_ROUNDS / block)))
            again = of_blocks[draw].reshape(len(hit), -1)[:, :AGREE_ROUNDS]
            agreed[hit] += claimed(again, (again > 0).cumsum(axis=1, dtype=np.uint8), *second)
        single += int(claimed(signs, above, *alone).sum())
        some = windows[starts[:NAIVE_TABLES]].reshape(min(tables, NAIVE_TABLES), -1)[:, :MAX_ROUNDS]
        for name, rates_of in naive.items():
            rates_of.append(float(RULES[name](some).mean()))
    return Resampled(
        len(series),
        block,
        tables,
        claims,
        by_series,
        single / (tables * len(series)),
        {name: float(np.mean(each)) for name, each in naive.items()},
        agreed,
    )


def recorded(source: str, tables: int, block: int | None, least: int, seed: int) -> None:
    """Print what resampled tables of a source come to.

    Raises:
        RecordedError: no recording has rounds enough.
    """
    found = read(source)
    series = centred_series(found, least)
    if not series:
        raise RecordedError(f"{source}: no cell has {least} rounds; a smaller --least takes more of them")
    lag1 = autocorrelation(series, 1)
    length = block or block_length(lag1, float(np.median([len(values) for values in series])))
    rng = np.random.default_rng([seed, 1])
    mixed = [rng.permutation(values) for values in series]
    asked = [
        (f"blocks of {length}", resample(series, tables, length, seed)),
        (f"blocks of {length}, each cell's rounds shuffled first", resample(mixed, tables, length, seed)),
        ("single rounds", resample(series, tables, 1, seed)),
    ]
    result = asked[0][1]
    cells = len({item.cell.id for item in found.items})
    write = sys.stdout.write
    write(
        f"{source}: {found.device}, {cells} cells; {result.series} series of at least {least} rounds, "
        f"lag-1 autocorrelation {lag1:+.3f}; {tables} tables, seed {seed}\n\n"
    )
    rows: list[list[object]] = []
    for name, each in asked:
        most = np.sort(each.by_series)[::-1]
        share = most[: max(1, len(most) // 100)].sum() / max(1, most.sum())
        rows.append(
            [
                name,
                f"{each.claims.mean() / each.series:.1e}",
                f"{each.claims.mean():.4f}",
                f"{each.broken:.2%}",
                f"{each.stands:.2%}",
                f"{share:.0%}",
                f"{each.single:.2%}",
            ]
        )
    head = (
        f"sign e-process at N = {result.series}, resampled in",
        "false claims per claim",
        "per table",
        f"tables with any (stated: at most {ALPHA:.0%})",
        "after a second process",
        "of these by 1 % of the series",
        "per claim at N = 1 (stated: 5 %)",
    )
    write(table(head, rows) + "\n")
    named = {
        "median10": "median of 10 rounds past the margin",
        "t-peek": "95 % t-bound, at every look",
        "t-end": "95 % t-bound, at the end",
    }
    rows = [[named[rule], *(f"{each.naive[rule]:.1%}" for _, each in asked)] for rule in named]
    write(table(("common rules, false claims per claim", *(name for name, _ in asked)), rows))


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 cells instead of 20,000")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--recorded", metavar="SOURCE", help="resample this source's rounds instead")
    parser.add_argument("--tables", type=int, default=10_000, help="simulated with --recorded")
    parser.add_argument("--least", type=int, default=LEAST_ROUNDS, help="rounds that a series needs")
    parser.add_argument("--block", type=int, help="rounds in a block; from the autocorrelation if left out")
    options = parser.parse_args(arguments)
    if min(options.tables, options.block or 1, options.least - 1) < 1:
        parser.error("--tables and --block must be at least 1, --least 2")
    if options.recorded is not None:
        return ended(
            lambda: recorded(options.recorded, options.tables, options.block, options.least, options.seed),
            "false_claims",
        )
    cells = 2_000 if options.quick else 20_000
    found = rates(cells, options.seed)
    write = sys.stdout.write
    write(f"false claims of 'more than {MARGIN:.0%} faster', {cells} cells exactly at the margin\n")
    write(f"{'noise':<10}" + "".join(f"{rule:>10}" for rule in RULES) + f"{'t-peek : sign':>16}\n")
    for name, row in found.items():
        ratio = f"{row['t-peek'] / row['sign']:.0f} : 1" if row["sign"] else "-"
        write(f"{name:<10}" + "".join(f"{row[rule]:>10.2%}" for rule in RULES) + f"{ratio:>16}\n")
    write(f"chance of any false claim in a table of {CELLS} such cells\n")
    for name, row in found.items():
        anywhere = {rule: 1 - (1 - rate) ** CELLS for rule, rate in row.items()}
        write(f"{name:<10}" + "".join(f"{anywhere[rule]:>10.1%}" for rule in RULES) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
