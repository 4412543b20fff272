"""The routing table: model, strict load, dump, build from decisions, diff.

A serving process imports ``autotune.table.load`` (through the router); the writing side lives in modules
that it never imports. Importing this package itself imports nothing.
"""

from __future__ import annotations

from typing import Any


def schema() -> dict[str, Any]:
    """The published JSON Schema (draft 2020-12) of a table, as parsed from ``autotune/table/schema.json``.

    It describes structure. ``autotune.table.load`` checks more: the digest, and every relation between
    rows, intervals, letters and proofs that a schema cannot express.
    """
    import json  # lazily: a serving process does not need it
    from pathlib import Path

    parsed: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return parsed
