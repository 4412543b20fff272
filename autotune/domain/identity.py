"""Short, stable identities of plain data."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def stable_id(data: Any, length: int = 12) -> str:
    """First ``length`` hex digits of the SHA-256 of canonical JSON: equal data, equal id, on any machine."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
