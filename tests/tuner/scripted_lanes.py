"""Lanes whose children answer from a script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from autotune.domain.cell import Column
from autotune.domain.verdict import UnprovenReason
from autotune.tuner.crew import Crew
from autotune.tuner.deadline import Deadline
from autotune.tuner.lanes import Lane
from autotune.tuner.listener import Silent
from autotune.tuner.run import OpenedRun
from autotune.tuner.strategy import Strategy
from autotune.tuner.tuner import Progress, Tuner
from autotune.worker.base import Broken, Completed, JobError, Outcome
from autotune.worker.jobs import ProveJob, TimeJob
from autotune.worker.presence import PresenceJob
from autotune.worker.worker import Worker
from tests.tuner.scripted import ScriptedWorker


@dataclass
class LaneWorker(ScriptedWorker):
    """A scripted worker of a lane, which also says that its device is there."""

    columns: list[tuple[str, str, str]] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    lost: bool = False
    before_proof: Callable[[], None] = lambda: None
    before_time: Callable[[], None] = lambda: None

    def run(self, job: Any, **options: Any) -> Outcome:
        if isinstance(job, PresenceJob):
            return JobError("RuntimeError", "no device") if self.lost else Completed("here")
        if isinstance(job, ProveJob):
            self.before_proof()
            column = Column.from_dict(job.column)
            self.columns.append((f"{column.id} {job.kv_lens}", job.route, job.check))
        elif isinstance(job, TimeJob):
            self.before_time()
            self.cells.append(str(job.cell))
        if self.lost:
            return Broken(UnprovenReason.INFRASTRUCTURE, "no CUDA-capable device is detected", "")
        return super().run(job, **options)


class Heard(Silent):
    """Remembers warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warned(self, line: str) -> None:
        self.warnings.append(line)


def lane(name: str, worker: LaneWorker, provers: int = 1) -> Lane:
    each = cast(Worker, worker)
    return Lane(name, Crew([each] * provers), each, "here")


def together(
    run: OpenedRun,
    *workers: LaneWorker,
    heard: Heard | None = None,
    seconds: float | None = None,
    strategy: Strategy | None = None,
) -> Progress:
    """One call of the tuner with a lane for each worker."""
    lanes = [lane(f"cuda:{index}", worker) for index, worker in enumerate(workers)]
    first = lanes[0]
    return Tuner(
        run, first.crew, first.timer, heard or Heard(), Deadline(seconds), None, strategy, lanes=lanes
    ).sweep()
