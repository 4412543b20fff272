"""Short, stable identities of plain data."""

from __future__ import annotations

from typing import Any


def stable_id(data: Any, length: int = 12) -> str:
    """First ``length`` hex digits of the SHA-256 of canonical JSON: equal data, equal id, on any machine."""
    import hashlib  # here: a serving process that only looks up never needs them
    import json

    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
