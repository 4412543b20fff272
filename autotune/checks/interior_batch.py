"""``interior_batch``: an eager session opened for an interval's largest batch, run with smaller ones.

Kernels change their KV split inside an interval, and plans leave stale rows behind: big, small, big again.
"""

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

DRAWN = 2  # batch sizes drawn inside the interval, besides both ends and the column's own


class InteriorBatch:
    """Both ends and a few batch sizes between them, in one session."""

    name = "interior_batch"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Only to a column that stands for an interval."""
        return None if trial.column.interval else "the column is one captured batch size, not an interval"

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        interval = stage.trial.column.interval
        assert interval is not None
        low, high = interval
        rng = random.Random(stage.seed(0))
        drawn = [rng.randint(low, high) for _ in range(DRAWN)]
        recipes = [
            Recipe(tuple(lengths.short(stage.trial, rng, size)), seed=stage.seed(index + 1))
            for index, size in enumerate([high, low, *drawn, stage.trial.column.batch_size, high])
        ]
        stage.sequence(recipes, f"live batch inside {low}..{high}, step")
