"""Identity of the code that a proof depends on."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

# A stored self-test counts only for the very code that passed it: everything that makes operands, runs
# routes, judges them or isolates them. The rest of the tuner and the table cannot change a check's outcome.
PARTS = ("domain", "arena", "routes", "checks", "bench", "worker", "hardware")
FILES = ("tuner/selftest.py",)


@lru_cache(maxsize=1)
def code_version() -> str:
    """12 hex digits over the names and bytes of the package's sources in :data:`PARTS` and :data:`FILES`."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    files = [path for part in PARTS for path in sorted((root / part).rglob("*.py"))]
    for path in [*files, *(root / name for name in FILES)]:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
