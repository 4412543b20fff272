"""Which cells are timed again to measure tau. Pure, seeded, and blind to every ratio."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from autotune.bench.shift import MIN_CELLS
from autotune.domain.identity import stable_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from autotune.domain.cell import Cell

# Cells that are re-timed for tau, and the rounds that one needs to count. 16 put the median of a 3 % noise to
# 1 %, and let a second process agree with a claim that 14 of them bear out.
CELLS = 24
ROUNDS = 16
# Rounds that it gets. On CUDA a round takes a millisecond or two, and opening the cell hundreds.
ROUNDS_OF = {"cpu": ROUNDS, "cuda": 64}
# Cells that share a child. On the CPU a fresh one is there in some 15 ms; on CUDA it costs a context and the
# library's modules, about 3 s, so six children serve the sample.
CELLS_A_CHILD = {"cpu": 1, "cuda": 4}
# With so many cells timed the first are drawn, so that a study in many short calls gets its tau early. A
# few more follow at every doubling: cells come in the order of the search, the costly ones late.
FIRST, STEP = 8, 4


def due(timed: int, *, last: bool) -> int:
    """How many cells should be in the sample once ``timed`` cells are timed.

    Args:
        last: no more cells will be timed: all that may be.
    """
    if timed < (MIN_CELLS if last else CELLS):
        return 0
    if last:
        return min(CELLS, timed)
    return min(CELLS, FIRST + STEP * ((timed // CELLS).bit_length() - 1))


def draw(seed: int, drawn: Iterable[Cell], timed: Sequence[Cell]) -> Cell | None:
    """The next cell of the sample: of the ``timed`` ones that are not ``drawn``, one whose axes' values were
    drawn least, whichever of these comes first by a hash of the seed and the cell. None: there is none left.
    """
    known = {cell.id: cell for cell in drawn}
    seen = Counter(value for cell in known.values() for value in _axes(cell))
    return min(
        (cell for cell in timed if cell.id not in known),
        key=lambda cell: (sum(seen[value] for value in _axes(cell)), stable_id(["sample", seed, cell.id])),
        default=None,
    )


def _axes(cell: Cell) -> tuple[tuple[str, object], ...]:
    column = cell.column
    return (
        ("shape", column.shape),
        ("dtypes", column.dtypes),
        ("q_len", column.q_len),
        ("batch_size", column.batch_size),
        ("kv_high", cell.kv_high),
    )
