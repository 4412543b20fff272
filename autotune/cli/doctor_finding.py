"""One line of ``autotune doctor``."""

from __future__ import annotations

from typing import Any


def finding(what: str, ok: bool | None, detail: str, **more: Any) -> dict[str, Any]:
    """What was looked at, whether it is there (None: only worth knowing), and what to do if it is not.

    Args:
        more: for ``--json`` alone.
    """
    return {"what": what, "ok": ok, "detail": detail, **more}
