"""``padded_rows``: rows that an engine added to reach a captured size.

Their ``seq_lens`` is the engine's pad value (and that plus q_len, where the engine adds it), their page table
row is all zeros. Live rows must be right beside them; padded rows must be written and finite, because later
layers read them, whatever they hold.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from autotune.arena.operands import Operands, Recipe
from autotune.checks import lengths
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Stage, conduct

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult


class PaddedRows:
    """Some rows padded (the last half, as engines do), then all."""

    name = "padded_rows"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always; a batch of one can only be padded as a whole."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        trial, size = stage.trial, stage.trial.column.batch_size
        rng = random.Random(stage.seed(0))
        pads = [trial.pad_value, trial.pad_value + trial.column.q_len]
        pads = [value for value in pads if value <= trial.column.max_context]
        live_counts = [(size + 1) // 2, 0] if size > 1 else [0]
        cases = [(value, live) for value in pads for live in live_counts]
        recipes = []
        for index, (value, live) in enumerate(cases):
            # a row needs a token to be built; `pad` then writes the engine's value, which may be 0
            kv_lens = (*lengths.short(trial, rng, live), *[max(1, value)] * (size - live))
            recipes.append(Recipe(kv_lens, seed=stage.seed(index + 1)))
        recipes = stage.one_pool(recipes)
        with stage.opened(recipes[0]) as opened:
            for (value, live), recipe in zip(cases, recipes, strict=True):
                operands = opened.build(recipe)
                pad(operands, live, value)
                label = f"{size - live} of {size} rows padded with {value}"
                opened.launch(operands, label, live=range(live))


def pad(operands: Operands, live: int, value: int) -> None:
    """Turn all but the first ``live`` requests into padded rows of length ``value``, as an engine does."""
    step = operands.step
    step.seq_lens[live:] = value
    step.page_table[live:] = 0
    if step.host_kv_lens is not None:
        step.host_kv_lens = (*step.host_kv_lens[:live], *[value] * (step.batch_size - live))
