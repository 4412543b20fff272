"""``repeats``: the same operands give the same bits, over and over in one session.

``out`` is poisoned anew each time. A route documented as not deterministic must stay within the bound
instead. Ten launches find a fault of one launch in four with 94 % and one in a hundred with 10 %: rare races
need the repeat counts of a soak, not of a proof that takes milliseconds.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from autotune.arena.contents import bits
from autotune.arena.operands import Recipe
from autotune.checks import lengths, oracle
from autotune.checks.blame import FindingError
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Stage, conduct
from autotune.domain.verdict import FailureKind

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

RUNS = 10


class Repeats:
    """One ragged batch of a few pages, ten times."""

    name = "repeats"
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
        recipe = Recipe(tuple(lengths.short(trial, rng, trial.column.batch_size)), seed=stage.seed(1))
        with stage.opened(recipe) as opened:
            operands = opened.build(recipe)
            ref = oracle.reference(operands)
            first = None
            for run in range(1, RUNS + 1):
                label = f"run {run} of {RUNS}"
                opened.fire(operands, label)
                if first is None or not trial.route.deterministic:
                    opened.judge(operands, label, ref)
                    first = bits(operands.out).clone()
                    continue
                changed = bits(operands.out) != first
                if bool(changed.any()):
                    row, head, _ = (int(i) for i in changed.nonzero()[0])
                    raise FindingError(
                        FailureKind.NONDETERMINISTIC,
                        f"{int(changed.sum())} of {changed.numel()} elements differ from run 1, first at "
                        f"{stage.place(operands, row, head)} ({stage.describe(label, recipe.kv_lens)})",
                    )
