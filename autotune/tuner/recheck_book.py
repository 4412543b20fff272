"""The second processes of one study in memory: what their rounds are, and which of them measure tau."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.bench.record import Round
from autotune.store.records import Recheck
from autotune.tuner.sample import ROUNDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune.domain.cell import Cell
    from autotune.store.records import Study
    from autotune.store.repository import Repository


class RecheckBook:
    """Every stored round of every process that timed a cell again.

    Attributes:
        version: rises when anything that tau is computed from changes.
    """

    def __init__(self, repository: Repository, study: Study) -> None:
        self._repository = repository
        self._study = study
        self._processes = repository.rechecks(study)
        found = repository.cells(study) if self._processes else []
        self._cells = {item.cell.id: item.cell for item in found if item.cell.id in self._processes}
        self.version = 0

    def rounds(self, cell: Cell) -> tuple[Round, ...]:
        """The cell's rounds in all later processes, in order, numbered on from process to process."""
        found: list[Round] = []
        for process in self._processes.get(cell.id, ()):
            for data in process.rounds:
                found.append(replace(Round.from_dict(data), index=len(found)))
        return tuple(found)

    def count(self, cell: Cell) -> int:
        """How many rounds all later processes of the cell have; they are only ever appended."""
        return sum(len(process.rounds) for process in self._processes.get(cell.id, ()))

    def next_process(self, cell: Cell) -> int:
        """The number of the child that times the cell next."""
        return len(self._processes.get(cell.id, ())) + 1

    def append(
        self, cell: Cell, process: int, first: int, rounds: Sequence[Mapping[str, Any]], *, sampled: bool
    ) -> None:
        """Commit rounds, then count them."""
        self._repository.append_recheck(self._study, cell, process, first, rounds, sampled=sampled)
        mine = self._processes.setdefault(cell.id, [])
        if len(mine) < process:
            mine.append(Recheck(process, sampled, ()))
        mine[-1] = replace(mine[-1], rounds=(*mine[-1].rounds, *rounds))
        self._cells[cell.id] = cell
        self.version += sampled

    def raced(self, cell: Cell) -> None:
        """The cell's first rounds became more: what they are held against changes with them."""
        self.version += cell.id in self._processes

    def drawn(self) -> dict[Cell, bool]:
        """The cells of the sample, and whether each has its rounds: a child may have ended before."""
        return {
            self._cells[cell_id]: any(_whole(process) for process in processes)
            for cell_id, processes in self._processes.items()
            if any(process.sampled for process in processes)
        }

    def sample(self) -> dict[Cell, tuple[Round, ...]]:
        """The cells that measure tau, each with the rounds of the first child that had enough of them."""
        found = {}
        for cell_id, processes in self._processes.items():
            whole = next((process for process in processes if _whole(process)), None)
            if whole is not None:
                found[self._cells[cell_id]] = tuple(Round.from_dict(data) for data in whole.rounds)
        return found


def _whole(process: Recheck) -> bool:
    return process.sampled and len(process.rounds) >= ROUNDS
