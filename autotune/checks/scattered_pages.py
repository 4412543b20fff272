"""``scattered_pages``: shuffled pages, and pages so far into a pool that 32-bit offsets wrap.

The far pool holds more than 2^31 elements before its first live page where that much can be had, else more
than 2^31 bytes; how far it went is stated as a limit. It is a plain allocation; on the CPU nobody writes its
dead pages, which then cost no memory. What counts there is which page is read, and an offset that
wrapped reads another; the shuffled pool before it is guarded.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from autotune.arena.base import ArenaError
from autotune.arena.operands import PageOrder, Recipe, pages_of
from autotune.arena.plain import PlainArena
from autotune.checks import lengths
from autotune.checks.blame import is_out_of_memory
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Stage, conduct
from autotune.domain.dtypes import BITS, Dtype

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.cell import Column
    from autotune.domain.verdict import CheckResult

REACH = 2**31


def page_bytes(column: Column) -> int:
    """Bytes of one page of K (V's may be smaller or larger; it has the same ids)."""
    shape = column.shape
    return shape.page_size * shape.num_kv_heads * shape.head_dim * BITS[Dtype(column.dtypes.kv)] // 8


def far_pools(column: Column, live: int) -> list[int]:
    """Pool sizes in pages, farthest first: live pages past 2^31 elements, then past 2^31 bytes."""
    elements = column.shape.page_size * column.shape.num_kv_heads * column.shape.head_dim
    return [REACH // elements + 1 + live, REACH // page_bytes(column) + 1 + live]


class ScatteredPages:
    """A shuffled pool with many pages between the live ones, then a far one."""

    name = "scattered_pages"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        trial, column = stage.trial, stage.trial.column
        rng = random.Random(stage.seed(0))
        kv_lens = tuple(lengths.short(trial, rng, column.batch_size))
        live = sum(pages_of(kv_len, column.shape.page_size) for kv_len in kv_lens)
        stage.once(Recipe(kv_lens, seed=stage.seed(1), dead_pages=2 * live), "shuffled pages")

        pools = far_pools(column, live)
        for attempt, total in enumerate(pools):
            recipe = Recipe(
                kv_lens,
                seed=stage.seed(2),
                order=PageOrder.FAR_END,
                pool_pages=total,
                fill_dead=trial.device != "cpu",
            )
            first = total - live
            reach = f"{first * page_bytes(column) / 2**30:.0f} GiB"
            try:
                with stage.opened(recipe) as opened, PlainArena(trial.device) as far:
                    operands = opened.build(recipe, pool=far)
                    opened.launch(operands, f"live pages from id {first} on, {reach} into K")
            except Exception as error:
                no_room = isinstance(error, ArenaError) or is_out_of_memory(error)
                if not no_room or attempt == len(pools) - 1:
                    raise
                continue
            stage.limits.append(f"page ids below {first} ({reach} of K)")
            return
