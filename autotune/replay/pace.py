"""What each recorded round is charged, for any of its routes."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.bench.record import Round
    from autotune.replay.recording import RecordedTiming


class RecordedPace:
    """How long a cell's recorded rounds took, each for itself."""

    def __init__(self, timing: RecordedTiming) -> None:
        self._rounds = timing.rounds
        first = 0
        self._ends: list[int] = []
        per_round: list[float] = []
        for size, seconds in timing.chunks:
            first += size
            self._ends += [first] * size
            per_round += [seconds / size] * size
        size, seconds = timing.chunks[0]
        later = [seconds / size for size, seconds in timing.chunks[1:]]
        usual = median(later) if later else max(_groups(each) for each in self._rounds)
        self._start = max(0.0, seconds - usual * size)
        per_round[:size] = [(seconds - self._start) / size] * size
        self._per_round = per_round

    def chunk_end(self, at: int) -> int:
        """One past the last round of the chunk that holds round ``at``."""
        return self._ends[at]

    def start(self, live: Sequence[str]) -> float:
        """Seconds before the first round of a job."""
        return self._start * min(1.0, len(live) / len(self._rounds[0].order))

    def seconds(self, index: int, live: Sequence[str]) -> float:
        """Seconds of a round with only ``live`` of its routes."""
        whole = self._rounds[index]
        share = _groups(whole, live) / _groups(whole)
        return self._per_round[index] * share


def _groups(each: Round, live: Sequence[str] | None = None) -> float:
    """Seconds that the routes' groups of calls ran: their share of a round."""
    return (
        sum(us * each.calls[name] for name, us in each.run_us.items() if live is None or name in live) / 1e6
    )
