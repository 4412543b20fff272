"""``table_garbage``: page-table entries past a row's live pages are not followed.

Engines leave there what the last request left. -1, INT32_MAX and the pool's size point outside the pool, so
following one faults; kernels that clamp or skip a bad id are met by a good one, of a page full of NaN.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from autotune.arena.operands import Operands, Recipe, pages_of, pool_pages
from autotune.checks import lengths
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Stage, conduct

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

INT32_MAX = 2**31 - 1


class TableGarbage:
    """One ragged batch, its dead entries set to each kind of garbage in turn."""

    name = "table_garbage"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Not where the page table has no room for a dead entry."""
        if trial.column.table_width == pages_of(trial.column.q_len, trial.column.shape.page_size):
            return "every page-table entry is live: the table is as wide as the shortest request"
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        trial, page = stage.trial, stage.trial.column.shape.page_size
        rng = random.Random(stage.seed(0))
        # the shortest request leaves entries dead in every column to which this applies
        kv_lens = (*lengths.short(trial, rng, trial.column.batch_size - 1), trial.column.q_len)
        recipe = Recipe(kv_lens, seed=stage.seed(1))
        total = pool_pages(trial.column, recipe)
        with stage.opened(recipe) as opened:
            operands = opened.build(recipe)
            owned = {page_id for pages in operands.pages for page_id in pages}
            nan_page = next(page_id for page_id in range(total) if page_id not in owned)
            for cache in operands.caches:
                cache.fill_nan(torch.tensor([nan_page], device=operands.step.q.device))
            for garbage, label in (
                (nan_page, "dead entries point to a page of NaN"),
                (-1, "dead entries are -1"),
                (total, "dead entries are the pool's size"),
                (INT32_MAX, "dead entries are INT32_MAX"),
            ):
                _fill_dead_entries(operands, page, garbage)
                opened.launch(operands, label)


def _fill_dead_entries(operands: Operands, page_size: int, garbage: int) -> None:
    table = operands.step.page_table
    live = torch.tensor([pages_of(kv_len, page_size) for kv_len in operands.recipe.kv_lens])
    dead = torch.arange(table.shape[1], device=table.device) >= live.to(table.device)[:, None]
    table.masked_fill_(dead, garbage)
