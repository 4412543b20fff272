"""How often is "more than 5 % faster" claimed where it is false? The sign e-process against common rules.

    python benchmarks/false_claims.py [--quick] [--seed N]

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
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from fractions import Fraction
from math import log

import numpy as np
from numpy.typing import NDArray

from autotune.bench.eprocess import DROP_AT, MAX_ROUNDS, least_successes

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


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 cells instead of 20,000")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    cells = 2_000 if options.quick else 20_000
    table = rates(cells, options.seed)
    write = sys.stdout.write
    write(f"false claims of 'more than {MARGIN:.0%} faster', {cells} cells exactly at the margin\n")
    write(f"{'noise':<10}" + "".join(f"{rule:>10}" for rule in RULES) + f"{'t-peek : sign':>16}\n")
    for name, row in table.items():
        ratio = f"{row['t-peek'] / row['sign']:.0f} : 1" if row["sign"] else "-"
        write(f"{name:<10}" + "".join(f"{row[rule]:>10.2%}" for rule in RULES) + f"{ratio:>16}\n")
    write(f"chance of any false claim in a table of {CELLS} such cells\n")
    for name, row in table.items():
        anywhere = {rule: 1 - (1 - rate) ** CELLS for rule, rate in row.items()}
        write(f"{name:<10}" + "".join(f"{anywhere[rule]:>10.1%}" for rule in RULES) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
