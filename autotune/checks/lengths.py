"""Which KV lengths a check gives its rows.

Long rows cost operands and fp64 references in proportion, so a launch takes the long lengths it is about and
fills its other rows with short ones: a batch stays full without being long.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from autotune.arena.base import Placement

if TYPE_CHECKING:
    from autotune.checks.base import Trial

SHORT_PAGES = 4  # a filler row has at most this many pages (and at least q_len tokens)


def ends(trial: Trial) -> list[int]:
    """``trial.kv_lens`` in the column's legal range (q_len..max_context), ascending and distinct."""
    column = trial.column
    return sorted({min(max(n, column.q_len), column.max_context) for n in trial.kv_lens or (column.q_len,)})


def longest(trial: Trial) -> int:
    """The largest length that this proof is about."""
    return ends(trial)[-1]


def ends_in(trial: Trial, placement: Placement, rng: random.Random) -> list[int]:
    """The ends that a check visits in one placement: all with operands flush at the tail, a random one else.

    Lengths decide how far a kernel reads, which is the tail's business; the front is the same for all.
    """
    every = ends(trial)
    return every if placement is Placement.TAIL else [rng.choice(every)]


def short(trial: Trial, rng: random.Random, count: int) -> list[int]:
    """Random lengths of a few pages."""
    low = trial.column.q_len
    high = min(longest(trial), max(low, SHORT_PAGES * trial.column.shape.page_size))
    return [rng.randint(low, high) for _ in range(count)]


def spread(trial: Trial, rng: random.Random, count: int) -> list[int]:
    """Random lengths over the whole range, uniform in their logarithm."""
    low, high = trial.column.q_len, longest(trial)
    return [
        min(high, max(low, round(math.exp(rng.uniform(math.log(low), math.log(high)))))) for _ in range(count)
    ]


def batches(trial: Trial, rng: random.Random, lengths: list[int]) -> list[tuple[int, ...]]:
    """``lengths`` cut into batches of the column's size, the last one filled up with short ones."""
    size = trial.column.batch_size
    cut = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    return [tuple(part + short(trial, rng, size - len(part))) for part in cut]
