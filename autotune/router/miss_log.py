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

    def assumed(self, needs: tuple[str, ...]) -> None:
        """One line for what the fallback's proof assumed and a caller did not attest."""
        if "assumed" not in self._seen:
            self._seen.add("assumed")
            try:
                logger().warning(
                    "the fallback is proven only with %s, which was not attested; it answers all the same",
                    ", ".join(needs),
                )
            except Exception:
                return
