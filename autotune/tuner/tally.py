"""How far a study is: the same count at the beginning and the end of a call, and at every export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from autotune.domain.cell import Cell
    from autotune.tuner.run import OpenedRun


@dataclass(frozen=True, slots=True)
class Tally:
    """Cells with a stored decision, sorted by what is still to be done; the others are open.

    Attributes:
        settled: ids of those that no more work can change, for any engine and under any declared objective.
        waiting: ids of those whose only open question is a second process, each with the first objective,
            in the study's order, under which any engine's claim waits for one.
    """

    settled: frozenset[str]
    waiting: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, run: OpenedRun, decided: Container[str], settles: Callable[[Cell], bool] | None = None
    ) -> Tally:
        """Count from the stored rows.

        Args:
            decided: ids of the cells with a stored decision.
            settles: whether more work in a cell's first process could change no answer that is wanted; a
                search may leave candidates unproven that cannot win. None: :meth:`OpenedRun.settled`.
        """
        settles = settles or run.settled
        settled, waiting = set(), {}
        for item in run.cells:
            if item.cell.id in decided and settles(item.cell):
                objective = run.waits(item.cell)
                if objective is None:
                    settled.add(item.cell.id)
                else:
                    waiting[item.cell.id] = objective
        return cls(frozenset(settled), waiting)

    @property
    def by_objective(self) -> dict[str, int]:
        """How many cells wait, by objective."""
        return dict(Counter(self.waiting.values()))
