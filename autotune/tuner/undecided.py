"""Cells that an objective leaves undecided: one chosen at the export had no rounds run for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.bench.eprocess import State

if TYPE_CHECKING:
    from autotune.tuner.run import OpenedRun


@dataclass(frozen=True, slots=True)
class Undecided:
    """Timed cells without a claim in which a deployable candidate's test has not ended.

    Attributes:
        stopped: rounds ended while the test still went on; more rounds could decide.
        exhausted: every round there may be was run.
    """

    stopped: int = 0
    exhausted: int = 0

    @property
    def cells(self) -> int:
        """Both kinds."""
        return self.stopped + self.exhausted


def undecided(run: OpenedRun, objective: str) -> Undecided:
    """Count them, for the run's own engine.

    Args:
        objective: one that the study declares.
    """
    stopped = exhausted = 0
    for item in run.cells:
        known = run.judge.known(item.cell, objective)
        if known.decision.route is None:
            stopped += known.open_test is State.CONTINUE
            exhausted += known.open_test is State.EXHAUSTED
    return Undecided(stopped, exhausted)
