"""What a caller may pass as facts: an object, a dictionary, or a JSON file of one (``doctor --json``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from autotune.domain.fingerprint import Facts
from autotune.table.errors import TableError
from autotune.table.source import read_regular

FactsLike: TypeAlias = "Facts | Mapping[str, Any] | str | os.PathLike[str] | None"

_MAX_BYTES = 64 * 1024


def facts_from(given: FactsLike) -> Facts | None:
    """The facts, or None if none were given.

    Raises:
        ValueError: an unreadable or misshapen file, or another type; one line.
    """
    if given is None or isinstance(given, Facts):
        return given
    if isinstance(given, Mapping):
        return Facts.from_dict(given)
    if not isinstance(given, (str, os.PathLike)):
        raise ValueError(f"facts must be Facts, a dictionary or a path, not {type(given).__name__}")
    import json

    path = os.fspath(given)
    try:
        parsed = json.loads(read_regular(given, _MAX_BYTES))
        if not isinstance(parsed, dict):
            raise ValueError("must hold one JSON object")
        if "device" not in parsed and isinstance(parsed.get("facts"), dict):
            parsed = parsed["facts"]  # what ``autotune doctor --json`` prints
        return Facts.from_dict(parsed)
    except TableError as error:
        raise ValueError(f"facts file {path!r}: {error.problem}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"facts file {path!r}: {error}") from error
