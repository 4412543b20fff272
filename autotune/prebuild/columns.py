"""A list of columns in a file: modules for what no search space expresses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from autotune.domain.cell import Column
from autotune.prebuild.errors import PrebuildError

if TYPE_CHECKING:
    from pathlib import Path


class ColumnsError(PrebuildError):
    """A file that holds no list of columns; the message says which entry is wrong and why."""


def read(path: Path) -> list[Column]:
    """The columns of ``path``, a JSON list of them as they are stored (``Column.to_dict``), each once.

    Raises:
        ColumnsError: it cannot be read, or is no such list, or the list is empty.
    """
    try:
        entries = json.loads(path.read_text())
    except RecursionError as error:
        raise ColumnsError(f"{path} cannot be read as JSON: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ColumnsError(f"{path} cannot be read as JSON: {reason}") from error
    if not isinstance(entries, list) or not entries:
        raise ColumnsError(f"{path} must hold a JSON list of stored columns, one at least")
    columns = []
    for index, entry in enumerate(entries):
        try:
            columns.append(Column.from_dict(entry))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            said = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ColumnsError(f"{path}: entry {index} is not a stored column: {said}") from error
    return list(dict.fromkeys(columns))
