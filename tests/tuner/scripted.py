"""A worker that answers from a script, and routes that exist by name only: sweeps without kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from autotune.bench.record import Round
from autotune.checks import registry
from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.routes.base import Capture, Family, Need, Route
from autotune.space.engine import load_engine
from autotune.space.grid import expand
from autotune.space.space import load_file
from autotune.store.database import open_database
from autotune.tuner.crew import Crew
from autotune.tuner.deadline import Deadline
from autotune.tuner.listener import Silent
from autotune.tuner.run import OpenedRun, open_run
from autotune.tuner.target import Target
from autotune.tuner.tuner import Progress, Tuner
from autotune.worker.base import Broken, Completed, Failed, JobError, Outcome
from autotune.worker.jobs import ProveJob, TimeJob
from autotune.worker.worker import Worker
from tests.console import TINY

FACTS = Facts("cpu", {"name": "Test CPU"}, {"torch": "2"})


@dataclass(frozen=True)
class NamedRoute:
    """A route that is never opened."""

    name: str
    family: Family = Family.DECODE
    capture: Capture = Capture.NO
    needs: frozenset[Need] = frozenset()
    deterministic: bool = True
    version: int = 1
    refuses: str | None = None

    def supports(self, column: Column, facts: Facts) -> str | None:
        if self.refuses == "raise":
            raise RuntimeError("boom")
        return self.refuses

    def open(self, capacity: Any, allocate: Any) -> Any:
        raise AssertionError("nothing is launched here")


def routes(*names: str, **more: NamedRoute) -> dict[str, Route]:
    """The fallback, and others by name."""
    found = [NamedRoute("torch-sdpa", Family.CONTEXT), *(NamedRoute(name) for name in names), *more.values()]
    return {route.name: cast(Route, route) for route in found}


def target(engine: str = "generic", space: Path = TINY) -> Target:
    """The tiny space, or another, on a machine that does not exist."""
    return Target(expand(load_file(space), load_engine(engine)), FACTS, "cpu", "host_mmap", seed=7)


def failed(kind: FailureKind = FailureKind.WRONG_OUTPUT) -> Callable[[ProveJob], Outcome]:
    """The check fails."""
    return lambda job: Completed(row(job, CheckStatus.FAILED, kind=kind).to_dict())


def unproven(job: ProveJob) -> Outcome:
    """Nothing is known, through no fault of the kernel's."""
    return Broken(UnprovenReason.OUT_OF_MEMORY, "no memory", "")


def row(job: ProveJob, status: CheckStatus, **more: Any) -> CheckResult:
    """A proof row of the current version."""
    return CheckResult(job.check, registry.get(job.check).version, status, job.seed, launches=3, **more)


@dataclass
class ScriptedWorker:
    """Every check passes and every time is the same, unless the script says otherwise.

    Attributes:
        checks: by (route, check).
        times: microseconds of a run, by route.
        deaths: routes that die while they are timed, after their first chunk.
    """

    checks: dict[tuple[str, str], Callable[[ProveJob], Outcome]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    deaths: set[str] = field(default_factory=set)
    step: str = "{}: timing"
    proved: list[tuple[str, str]] = field(default_factory=list)
    timed: list[tuple[str, ...]] = field(default_factory=list)
    on_chunk: Callable[[], None] = lambda: None
    pid: int | None = None
    renewed: int = 0

    def recycle(self) -> None:
        self.renewed += 1

    def run(
        self,
        job: ProveJob | TimeJob,
        *,
        timeout_s: float,
        on_event: Callable[[Any], Any] | None = None,
        step_timeout_s: float | None = None,
    ) -> Outcome:
        if isinstance(job, ProveJob):
            self.proved.append((job.route, job.check))
            if answer := self.checks.get((job.route, job.check)):
                return answer(job)
            return Completed(row(job, CheckStatus.PASSED, worst_error=0.1).to_dict())
        assert on_event is not None
        self.timed.append(job.routes)
        live, first = job.routes, job.first_round
        while True:
            chunk = [self._round(i, live) for i in range(first, min(first + 4, job.settings["max_rounds"]))]
            first += len(chunk)
            self.on_chunk()
            reply = on_event({"rounds": [each.to_dict() for each in chunk]})
            if not reply:
                return Completed(first - job.first_round)
            if isinstance(reply, tuple):
                if unknown := set(reply) - set(live):  # as a child does
                    return JobError("BenchError", f"asked to go on with {sorted(unknown)}, live are {live}")
                live = reply
            if first >= job.settings["max_rounds"]:
                return Completed(first - job.first_round)
            if end := self._end():
                return end
            if dying := next((name for name in live if name in self.deaths), None):
                return Failed(FailureKind.ILLEGAL_ACCESS, "SIGSEGV", self.step.format(dying), steps=5)

    def _end(self) -> Outcome | None:
        """How timing ends after a chunk; None: it goes on."""
        return None

    def _round(self, index: int, live: tuple[str, ...]) -> Round:
        times = {name: self.times.get(name, 10.0) for name in live}
        return Round(index, live, times, times, dict.fromkeys(live, 1.0), dict.fromkeys(live, 1))


@contextmanager
def opened(folder: Path, known: dict[str, Route], place: Target | None = None) -> Iterator[OpenedRun]:
    """A run that is open for tuning."""
    folder.mkdir(exist_ok=True)
    with (
        open_database(f"sqlite:///{folder}/sweep.db") as database,
        open_run(database, place or target(), known, tuning=True) as run,
    ):
        yield run


def sweep(
    run: OpenedRun, worker: ScriptedWorker, *, trials: int | None = None, seconds: float | None = None
) -> Progress:
    """One call of the tuner, one worker for proofs and times."""
    return sweep_with(run, [worker], trials=trials, seconds=seconds)


def sweep_with(
    run: OpenedRun,
    provers: Sequence[ScriptedWorker],
    *,
    trials: int | None = None,
    seconds: float | None = None,
) -> Progress:
    """One call of the tuner; the first of the workers times too."""
    workers = [cast(Worker, worker) for worker in provers]
    return Tuner(run, Crew(workers), workers[0], Silent(), Deadline(seconds), trials).sweep()
