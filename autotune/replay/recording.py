"""A recorded study in memory: what was asked, what was answered, and how long each answer took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from autotune.replay.errors import RecordingError
from autotune.replay.packing import unpack

if TYPE_CHECKING:
    from autotune.bench.record import Round
    from autotune.domain.cell import Column
    from autotune.domain.decision import Decision
    from autotune.domain.verdict import CheckResult
    from autotune.store.records import Study, StudyCell


@dataclass(frozen=True)
class RecordedCheck:
    """A proof row; ``cell_id`` None is the column as a whole, ``seconds`` its share of the device's time."""

    column: Column
    cell_id: str | None
    route: str
    route_version: int
    result: CheckResult
    seconds: float


@dataclass(frozen=True)
class RecordedTiming:
    """The rounds of a cell.

    Attributes:
        packed: see :mod:`autotune.replay.packing`.
        chunks: (rounds, seconds) of each report, in order; what a report has of sessions that were opened and
            rounds that were thrown away is in its seconds.
    """

    packed: bytes
    chunks: tuple[tuple[int, float], ...]

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Every round, in order.

        Raises:
            RecordingError: the bytes are not those of rounds, or of another number of them.
        """
        try:
            found = tuple(unpack(self.packed))
        except ValueError as error:
            raise RecordingError(f"recorded rounds: {error}; make the file again") from None
        if len(found) != sum(size for size, _ in self.chunks):
            raise RecordingError(
                "recorded rounds: they are more or fewer than their chunks; make the file again"
            )
        return found

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(seconds for _, seconds in self.chunks)


@dataclass(frozen=True)
class RecordedAgain:
    """The rounds of a cell in one later process; ``sampled``: begun to measure tau, not for a near claim."""

    sampled: bool
    packed: bytes

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Every round, in order.

        Raises:
            RecordingError: the bytes are not those of rounds.
        """
        try:
            return tuple(unpack(self.packed))
        except ValueError as error:
            raise RecordingError(f"recorded rounds: {error}; make the file again") from None


@dataclass(frozen=True)
class Recording:
    """One study.

    Attributes:
        where: the file, for messages.
        cells: its queue.
        checks: every proof row of its columns, oldest first.
        timings: by cell id, of the cells that have rounds.
        decisions: as they were stored, by cell id.
        again: later processes of a cell, in order, by cell id.
    """

    where: str
    study: Study
    cells: tuple[StudyCell, ...]
    checks: tuple[RecordedCheck, ...]
    timings: Mapping[str, RecordedTiming]
    decisions: Mapping[str, Decision]
    again: Mapping[str, tuple[RecordedAgain, ...]] = field(default_factory=dict)

    @cached_property
    def routes(self) -> tuple[str, ...]:
        """Names of the routes that were proven, sorted."""
        return tuple(sorted({check.route for check in self.checks}))

    @property
    def seconds(self) -> float:
        """Recorded device time of everything."""
        return sum(check.seconds for check in self.checks) + sum(
            timing.seconds for timing in self.timings.values()
        )
