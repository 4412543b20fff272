"""``stale_state``: a large step, then smaller ones, in one session on one workspace.

Plans, counters, semaphores and partial sums of the large step are still there when the small one comes. What
a library documents as zero between launches must be: a session may name such parts of its workspace in
``zero_after``, a tuple of tensors. Last comes a step with the addresses, lengths and pages of the one before
and other contents, as every layer of an engine does: a copy that was kept is not what it asks about.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from autotune.arena.operands import Recipe
from autotune.checks import lengths
from autotune.checks.blame import FindingError
from autotune.checks.catalogue import VERSIONS
from autotune.checks.contents import renew
from autotune.checks.launch import Opened, Stage, conduct
from autotune.domain.verdict import FailureKind

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult


class StaleState:
    """The longest rows, the shortest, short ones, and the longest again, twice."""

    name = "stale_state"
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
        long = lengths.ends_in(trial, stage.placement, rng)[-1]
        # one long row: it is what makes a kernel split its KV, and a batch of them costs too much
        large = (long, *lengths.short(trial, rng, column.batch_size - 1))
        steps = {
            "large": large,
            "smallest after it": (column.q_len,) * column.batch_size,
            "small": tuple(lengths.short(trial, rng, column.batch_size)),
            "large again": large,
        }
        recipes = stage.one_pool(
            [Recipe(kv_lens, seed=stage.seed(index + 1)) for index, kv_lens in enumerate(steps.values())]
        )
        with stage.opened(recipes[0]) as opened:
            for label, recipe in zip(steps, recipes, strict=True):
                operands = opened.build(recipe)
                opened.launch(operands, label)
                _zero_after(stage, opened, stage.describe(label, recipe.kv_lens))
            renew(operands)
            opened.launch(operands, "the same metadata, other contents")


def _zero_after(stage: Stage, opened: Opened, text: str) -> None:
    parts: tuple[torch.Tensor, ...] = getattr(opened.session, "zero_after", ())
    for index, part in enumerate(parts):
        left = int(torch.count_nonzero(part.view(torch.uint8)))
        if left:
            raise FindingError(
                FailureKind.WRONG_OUTPUT,
                f"{left} bytes of workspace part {index}, documented as zero, are not after it ({text})",
            )
