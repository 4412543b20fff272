"""``ragged_lengths``: lengths at the edges where kernels go wrong.

0, 1 and -1 modulo the page, at the first pages and at each end of the column's KV rows; q_len itself, the
ends, and lengths drawn between them. Each batch is in ascending order, so that its last row is its longest: a
page table read too far then leaves the table, not just the row.
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


def edges(trial: Trial, ends: list[int]) -> list[int]:
    """The lengths this check tries around the first pages and around ``ends``, ascending."""
    column, page, top = trial.column, trial.column.shape.page_size, lengths.longest(trial)
    first = -(-column.q_len // page)
    around = [first * page, (first + 1) * page, *((end // page) * page for end in ends)]
    wanted = {column.q_len, column.q_len + 1, *ends, *(n + d for n in around for d in (-1, 0, 1))}
    return sorted(n for n in wanted if column.q_len <= n <= top)


class RaggedLengths:
    """All edges, in one session."""

    name = "ragged_lengths"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        rng = random.Random(stage.seed(0))
        ends = lengths.ends_in(stage.trial, stage.placement, rng)
        wanted = edges(stage.trial, ends) + lengths.spread(stage.trial, rng, 1)
        recipes = [
            Recipe(tuple(sorted(kv_lens)), seed=stage.seed(index + 1))
            for index, kv_lens in enumerate(lengths.batches(stage.trial, rng, sorted(wanted)))
        ]
        stage.sequence(recipes, "lengths at page edges, batch")
