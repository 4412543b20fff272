"""The rounds of one study's cells, decoded: the judges of a run ask for the same cell one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.bench.record import Round

if TYPE_CHECKING:
    from autotune.domain.cell import Cell
    from autotune.store.records import Study
    from autotune.store.repository import Repository


class CellRounds:
    """Holds the rounds of one cell, the last that was asked for; a study's would not fit into memory."""

    def __init__(self, repository: Repository, study: Study) -> None:
        self._repository = repository
        self._study = study
        self._held = ""  # whose rounds they are
        self._rounds: tuple[Round, ...] = ()

    def count(self, cell: Cell) -> int:
        """How many are stored: see :meth:`autotune.store.measurements.Measurements.round_count`."""
        return self._repository.round_count(self._study, cell)

    def of(self, cell: Cell) -> tuple[Round, ...]:
        """Every stored round of the cell, in order.

        Raises:
            RoundsConflictError: some are missing, or bear other numbers.
        """
        if self._held != cell.id or len(self._rounds) != self.count(cell):
            stored = self._repository.rounds(self._study, cell)
            self._rounds = tuple(Round.from_dict(data) for data in stored)
            self._held = cell.id
        return self._rounds
