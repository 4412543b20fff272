"""``scales``: dequantisation scales of K and V unlike each other and unlike 1.

A scale that is ignored, doubled, or taken from the other cache is invisible at 1. The caches hold what they
hold elsewhere, divided by their scales, so that the bound is the same.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from autotune.arena.operands import Recipe
from autotune.checks import lengths
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Stage, conduct
from autotune.routes.contract import SCALED

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

# (K, V): powers of two would hide a scale that is rounded to bf16 on its way.
SCALES = ((0.71, 1.37), (1.9, 0.43))


class Scales:
    """One ragged batch in one session, its scales changed between two launches."""

    name = "scales"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Only to a quantised KV cache."""
        if trial.column.dtypes.kv in SCALED:
            return None
        return f"{trial.column.dtypes.kv} KV is not quantised: by contract its scales are 1"

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        rng = random.Random(stage.seed(0))
        kv_lens = tuple(lengths.short(stage.trial, rng, stage.trial.column.batch_size))
        with stage.opened(Recipe(kv_lens, seed=stage.seed(1))) as opened:
            for index, (k_scale, v_scale) in enumerate(SCALES):
                recipe = Recipe(kv_lens, seed=stage.seed(index + 1), k_scale=k_scale, v_scale=v_scale)
                opened.launch(opened.build(recipe), f"K scale {k_scale}, V scale {v_scale}")
