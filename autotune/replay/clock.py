"""The clock of a replay: it stands still except where recorded work is answered."""

from __future__ import annotations


class RecordedClock:
    """Seconds of recorded device time since the start; give it to a ``Deadline`` as its clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Recorded work took so long."""
        self.now += seconds
