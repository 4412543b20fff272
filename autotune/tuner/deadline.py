"""How long this call may go on."""

from __future__ import annotations

import time


class Deadline:
    """A monotonic deadline; ``seconds`` None never passes."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, 0.0 once it has passed, infinity without a deadline."""
        return float("inf") if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0.0
