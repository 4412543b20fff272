"""Files that name single cells of a space: one a line, by its id or as ``plan`` and every message write it.

3f9c01ab77d2
8/1/128 page 64 bf16/bf16 q_len 4 batch 8 kv 1025..4096   # a comment
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from autotune.space.errors import SpaceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from autotune.domain.cell import Cell

_ID = re.compile(r"[0-9a-f]{12}")


def read_cells(path: Path, cells: Iterable[Cell]) -> list[str]:
    """Ids of the cells that ``path`` names, in its order.

    Args:
        cells: those that it may name.

    Raises:
        SpaceError: it cannot be read, names no cell, or one of its lines names none or several of ``cells``,
            or one that an earlier line has named.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpaceError(f"--cells {path}: {getattr(error, 'strerror', None) or error}") from error
    known: dict[str, list[str]] = {}
    for cell in cells:
        known.setdefault(cell.id, []).append(cell.id)
        known.setdefault(str(cell), []).append(cell.id)
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        word = " ".join(line.partition("#")[0].split())
        if not word:
            continue
        ids = known.get(word, [])
        where = f"--cells {path}: line {number}: {word[:80]!r}"
        if not ids:
            what = "has that id" if _ID.fullmatch(word) else "is written so"
            raise SpaceError(f"{where}: no cell of this space, engine and filters {what}; see autotune plan")
        if len(ids) > 1:
            raise SpaceError(
                f"{where}: {len(ids)} cells are written so; name one by its id: {', '.join(ids)}"
            )
        if ids[0] in found:
            raise SpaceError(f"{where}: line {found[ids[0]]} names this cell already")
        found[ids[0]] = number
    if not found:
        raise SpaceError(f"--cells {path}: names no cell")
    return list(found)
