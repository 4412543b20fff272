"""How long this call may go on."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """A monotonic deadline; ``seconds`` None never passes.

    Args:
        clock: seconds that only grow; whoever times or decides within the call reads it by :meth:`now`.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self.now = clock
        self._end = None if seconds is None else clock() + seconds

    @property
    def left(self) -> float:
        """Seconds left, 0.0 once it has passed, infinity without a deadline."""
        return float("inf") if self._end is None else max(0.0, self._end - self.now())

    @property
    def passed(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0.0
