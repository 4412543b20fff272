"""``reference``: random ragged batches against the fp64 oracle, every (row, head) within the bound."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from autotune.arena.operands import Recipe
from autotune.checks import lengths
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Stage, conduct

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult


class Reference:
    """The column's KV ends and random lengths between them."""

    name = "reference"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        trial = stage.trial
        rng = random.Random(stage.seed(0))
        # the ends, and half a batch (one row at least) drawn over the whole range between them
        wanted = lengths.ends_in(trial, stage.placement, rng)
        wanted += lengths.spread(trial, rng, max(1, trial.column.batch_size // 2))
        recipes = [
            Recipe(kv_lens, seed=stage.seed(index + 1))
            for index, kv_lens in enumerate(lengths.batches(trial, rng, wanted))
        ]
        stage.sequence(recipes, "random operands, batch")
