"""``soak``: random workloads of one cell in one session, each judged against the reference.

No part of a proof: proofs choose their operands to hit what is known to go wrong, this one draws everything,
to look for what is not known. ``benchmarks/soak.py`` runs it over the proven cells of a table.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.arena.operands import PageOrder, QueryStride, Recipe, Values
from autotune.checks.blame import FindingError
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Stage, conduct
from autotune.domain.verdict import FailureKind

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

LAUNCHES = 8  # a placement
GARBAGE = (0, -1, 2**31 - 1)
SMALLEST_SCALE, LARGEST_SCALE = 0.3, 3.0


class Soak:
    """Launches of one session: lengths, contents, page order, strides, garbage and scales at random.

    The longest row lies between the trial's smallest and largest ``kv_lens``, the others anywhere below it.
    """

    name = "soak"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        rng = random.Random(stage.seed(0))
        recipes = stage.one_pool([draw(stage, rng, index) for index in range(LAUNCHES)])
        with stage.opened(recipes[0]) as opened:
            for index, recipe in enumerate(recipes, 1):
                label = f"soak {index}/{LAUNCHES}"
                # a pool an arena: of a long row at a large batch a device holds one, not eight
                with stage.trial.make_arena(stage.placement) as pool:
                    opened.launch(opened.build(recipe, pool=pool), label)
                    if places := pool.overwritten():
                        text = stage.describe(label, recipe.kv_lens)
                        raise FindingError(
                            FailureKind.OUT_OF_BOUNDS_WRITE, f"{'; '.join(places[:3])} ({text})"
                        )


def draw(stage: Stage, rng: random.Random, index: int) -> Recipe:
    """A random launch of the trial's cell."""
    trial, column = stage.trial, stage.trial.column
    low, high = max(column.q_len, min(trial.kv_lens)), max(column.q_len, max(trial.kv_lens))
    longest = rng.randint(low, high)
    kv_lens = [rng.randint(column.q_len, longest) for _ in range(column.batch_size)]
    kv_lens[rng.randrange(len(kv_lens))] = longest
    recipe = Recipe(
        tuple(kv_lens),
        seed=stage.seed(index + 1),
        order=rng.choice((PageOrder.SEQUENTIAL, PageOrder.SHUFFLED)),
        query_stride=rng.choice(tuple(QueryStride)),
        table_garbage=rng.choice(GARBAGE),
        dead_pages=rng.randint(1, 64),
        values=Values.RANDOM,
    )
    if column.dtypes.kv not in ("e4m3", "nvfp4"):
        return recipe
    scales = [rng.uniform(SMALLEST_SCALE, LARGEST_SCALE) for _ in range(2)]
    return replace(recipe, k_scale=scales[0], v_scale=scales[1])
