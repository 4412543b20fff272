"""``--models``, ``--attn-tp``, ``--dtype``, ``--q-len``, ``--batch``, ``--kv``, ``--cells``: a part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import AttnTp, Batch, Cells, Dtype, Kv, Models, QLen

if TYPE_CHECKING:
    from autotune.space.grid import Grid


@dataclass(frozen=True)
class Filters:
    """The flags as written, comma lists each; None leaves an axis whole. A command takes them together.

    Attributes:
        cells: a file that names single cells of what the others leave; None: all of them.
    """

    models: Models = None
    attn_tp: AttnTp = None
    dtype: Dtype = None
    q_len: QLen = None
    batch: Batch = None
    kv: Kv = None
    cells: Cells = None

    def restrict(self, grid: Grid) -> Grid:
        """The part of ``grid`` that the flags name.

        Raises:
            CliError: not a list of numbers (exit 2).
            SpaceError: a value is not in the space, nothing is left, or the file of cells cannot be used
                (exit 2).
        """
        part = grid.restrict(
            models=_words(self.models),
            attn_tp=_numbers("--attn-tp", self.attn_tp),
            dtypes=_words(self.dtype),
            q_len=_numbers("--q-len", self.q_len),
            batch=_numbers("--batch", self.batch),
            kv=_numbers("--kv", self.kv),
        )
        if self.cells is None:
            return part
        from autotune.space.cells_file import read_cells

        return part.pick(read_cells(self.cells, (item.cell for item in part.cells)))


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _numbers(flag: str, text: str | None) -> list[int] | None:
    words = _words(text)
    if words is None:
        return None
    try:
        return [int(word) for word in words]
    except ValueError:
        raise CliError(f"{flag} {text!r}: write whole numbers, such as 1,4", Exit.USAGE) from None
