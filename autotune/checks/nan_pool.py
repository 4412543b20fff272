"""``nan_pool``: NaN in every dead place of the KV pool, in pages no request owns and in slots past a length.

A kernel that multiplies such a slot by a weight of zero makes NaN of its output. That is no fault where the
pool is finite, as an engine's is that zeroes it once and stores nothing but finite values: a leak passes,
and the row says ``requires: finite_pool``. The numbers must be right where nothing leaks.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from autotune.arena.operands import Operands, Recipe, pool_pages
from autotune.checks import lengths
from autotune.checks.blame import FindingError
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Stage, conduct
from autotune.domain.verdict import FailureKind, Requirement

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult


class NanPool:
    """Short ragged rows, and one at the longest length, among NaN."""

    name = "nan_pool"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        trial, page = stage.trial, stage.trial.column.shape.page_size
        rng = random.Random(stage.seed(0))
        longest = lengths.ends_in(trial, stage.placement, rng)[-1]
        # one row's last page holds a single token where that is legal: the longest tail there is
        single = (max(trial.column.q_len, longest) - 1) // page * page + 1
        wanted = [n for n in (single, longest) if trial.column.q_len <= n <= longest]
        recipes = [
            Recipe(kv_lens, seed=stage.seed(index + 1))
            for index, kv_lens in enumerate(lengths.batches(trial, rng, wanted))
        ]
        recipes = stage.one_pool(recipes)
        with stage.opened(recipes[0]) as opened:
            for index, recipe in enumerate(recipes):
                operands = opened.build(recipe)
                fill_dead_with_nan(operands)
                label = f"NaN in dead pages and slots, batch {index + 1}/{len(recipes)}"
                try:
                    opened.launch(operands, label)
                except FindingError as finding:
                    if finding.kind is not FailureKind.NAN_LEAK:
                        raise
                    stage.requires.append(Requirement.FINITE_POOL.value)
                    return


def fill_dead_with_nan(operands: Operands) -> None:
    """NaN into each page that no request owns and into each slot past its request's length."""
    step, page = operands.step, operands.column.shape.page_size
    total = pool_pages(operands.column, operands.recipe)
    dead = torch.ones(total, dtype=torch.bool)
    tails: list[tuple[int, int]] = []
    for pages, kv_len in zip(operands.pages, operands.recipe.kv_lens, strict=True):
        owned = torch.as_tensor(pages, dtype=torch.int64)
        dead[owned] = False
        if kv_len % page:
            tails.append((int(owned[-1]), kv_len % page))
    ids = dead.nonzero().flatten().to(step.q.device)
    after = torch.tensor(tails, dtype=torch.int64).view(-1, 2).to(step.q.device)
    for cache in operands.caches:
        cache.fill_nan(ids)
        cache.fill_nan_after(after[:, 0], after[:, 1])
