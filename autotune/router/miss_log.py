"""One log line per kind of miss and router, however many calls miss."""

from __future__ import annotations

from autotune.router.explanation import Explanation
from autotune.router.log import logger


class MissLog:
    """Remembers which kinds of miss were logged."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, found: Explanation) -> None:
        if found.why not in self._seen:
            self._seen.add(found.why)
            # A logging handler or filter is foreign code; serving must not die of it.
            try:
                logger().warning("fallback, %s: %s (further ones are not logged)", found.why, found.detail)
            except Exception:
                return
