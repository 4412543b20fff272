"""In place of a child: answers every job with what was recorded for it.

The rules:

- A proof is the recorded row of that column, route, adapter version, check and check version; asked for the
  same operands (the seed), it is the same row. Its recorded seconds pass.
- Timing gives the recorded rounds from the first one asked for, less the routes that are not asked for, and
  ends where the recording does. A round takes its recorded time; of a round with fewer routes than recorded,
  the share that these had in its groups of calls. The start of a job (sessions, rounds thrown away) takes
  what the first chunk took longer than its rounds, by the share of routes that are opened.
- Search rounds (a strategy's look at a cell before anything is proven) are the first recorded ones that have
  all routes looked at; their start takes as long as the recorded one did, which threw more rounds away.
- What was not recorded accuses nobody, takes no time, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.bench.record import RoundSettings
from autotune.checks import registry
from autotune.domain.cell import Cell, Column
from autotune.domain.verdict import CheckStatus, FailureKind, UnprovenReason
from autotune.replay.pace import RecordedPace
from autotune.tuner.book import TIMING
from autotune.tuner.prover import seed_of
from autotune.worker.base import Broken, Completed, Failed, Outcome
from autotune.worker.failure import FaultSite
from autotune.worker.jobs import ProveJob, TimeJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune.bench.record import Round
    from autotune.replay.clock import RecordedClock
    from autotune.replay.recording import RecordedCheck, RecordedTiming, Recording
    from autotune.routes.base import Route

NOT_RECORDED = "not recorded"
# What seeds the rounds of a look (tuner/scout.py).
LOOK = "look"

_Key = tuple[str, str, str, int]  # column id, route, check, seed


class RecordedWorker:
    """Runs no child. One may serve as the prover and the timer of a run at once.

    Attributes:
        pid: of a child; there is none.
        missing_checks: (column id, route, check, seed) that were asked for and not recorded.
        missing_rounds: ids of cells whose rounds ended before they were enough.
    """

    pid: int | None = None

    def __init__(self, recording: Recording, routes: Mapping[str, Route], clock: RecordedClock) -> None:
        self._recording = recording
        self._clock = clock
        self._seed = recording.study.seed
        self.missing_checks: set[_Key] = set()
        self.missing_rounds: set[str] = set()
        self._checks: dict[_Key, RecordedCheck] = {}
        self._deaths: dict[tuple[str, str], RecordedCheck] = {}
        versions = {check.name: check.version for check in registry.CHECKS}
        for row in recording.checks:
            name, result = row.route, row.result
            if name not in routes or row.route_version != routes[name].version:
                continue
            if result.check == TIMING and result.status is CheckStatus.FAILED and row.cell_id is not None:
                self._deaths[row.cell_id, name] = row
            elif versions.get(result.check) == result.version:
                self._checks[row.column.id, name, result.check, result.seed] = row

    def run(
        self,
        job: ProveJob | TimeJob,
        *,
        timeout_s: float,
        on_event: Callable[[Any], Any] | None = None,
        step_timeout_s: float | None = None,
    ) -> Outcome:
        """As ``Worker.run``, for the two jobs of a study."""
        if isinstance(job, ProveJob):
            return self._prove(job)
        assert on_event is not None
        return self._time(job, on_event)

    def lacks(self, cell: Cell) -> bool:
        """Whether something that was asked for in the cell, or about its column, was not recorded."""
        columns = {key[0] for key in self.missing_checks if key[2] not in registry.STATES_LIMITS}
        return cell.id in self.missing_rounds or cell.column.id in columns

    def _prove(self, job: ProveJob) -> Outcome:
        key = (Column.from_dict(job.column).id, job.route, job.check, job.seed)
        row = self._checks.get(key)
        if row is None:
            self.missing_checks.add(key)
            return Broken(UnprovenReason.INFRASTRUCTURE, NOT_RECORDED, "")
        self._clock.advance(row.seconds)
        result = row.result
        if result.kind is FailureKind.ILLEGAL_ACCESS:
            # the recorded row is the last word after the runs with padding: a site outside it asks for none
            site = FaultSite("", 0, False, offset=None)
            return Failed(result.kind, result.detail, "", fault=site, steps=result.launches)
        return Completed({**result.to_dict(), "route": job.route})

    def _time(self, job: TimeJob, on_event: Callable[[Any], Any]) -> Outcome:
        cell = Cell.from_dict(job.cell)
        timing = self._recording.timings.get(cell.id)
        if timing is not None and job.seed == seed_of(self._seed, cell.id, LOOK):
            return self._look(job, cell, timing, on_event)
        # a job of another seed is another measurement, such as one in a second process
        if timing is None or job.seed != seed_of(self._seed, cell.id, TIMING):
            return self._ended(cell, job.first_round)
        live, at, reported = job.routes, job.first_round, 0
        rounds, pace, most = timing.rounds, RecordedPace(timing), RoundSettings(**job.settings).chunk
        while True:
            following = rounds[at] if at < len(rounds) else None
            if died := self._died(cell, live, following):
                return died
            if following is None:
                return self._ended(cell, at)
            until = min(pace.chunk_end(at), at + most)
            chunk = list(_restricted(rounds[at:until], live))
            if not chunk:
                return self._ended(cell, at)
            if not reported:
                self._clock.advance(pace.start(live))
            self._clock.advance(sum(pace.seconds(each.index, live) for each in chunk))
            at += len(chunk)
            reported += len(chunk)
            answer = on_event({"rounds": [each.to_dict() for each in chunk]})
            if not answer:
                return Completed(reported)
            live = answer if isinstance(answer, tuple) else live

    def _look(
        self, job: TimeJob, cell: Cell, timing: RecordedTiming, on_event: Callable[[Any], Any]
    ) -> Outcome:
        """The first recorded rounds that have every route asked for, as rounds 0, 1, ..."""
        most = RoundSettings(**job.settings).max_rounds
        both = [each for each in timing.rounds if all(name in each.run_us for name in job.routes)][:most]
        if not both:
            return self._ended(cell, 0)
        pace = RecordedPace(timing)
        self._clock.advance(pace.start(job.routes))
        self._clock.advance(sum(pace.seconds(each.index, job.routes) for each in both))
        found = [replace(each, index=i) for i, each in enumerate(_restricted(both, job.routes))]
        on_event({"rounds": [each.to_dict() for each in found]})
        return Completed(len(found))

    def _died(self, cell: Cell, live: Sequence[str], following: Round | None) -> Failed | None:
        """The recorded death, while timing, of a live route that is not in the round that follows."""
        for name in live:
            row = self._deaths.get((cell.id, name))
            if row is not None and (following is None or name not in following.run_us):
                assert row.result.kind is not None
                # the stored detail ends with the step, which whoever stores it adds again
                detail, mark, step = row.result.detail.rpartition(f" ({name}: ")
                if not mark:
                    detail, step = row.result.detail, "timing)"
                return Failed(
                    row.result.kind, detail, f"{name}: {step.removesuffix(')')}", steps=row.result.launches
                )
        return None

    def _ended(self, cell: Cell, at: int) -> Broken:
        self.missing_rounds.add(cell.id)
        return Broken(UnprovenReason.BUDGET, f"{NOT_RECORDED}: rounds from {at} on", "")


def _restricted(rounds: Sequence[Round], live: Sequence[str]) -> Iterator[Round]:
    """The rounds less other routes than ``live``, up to the first that has none of them.

    A route that joined late is missing in the rounds before, here as in the recorded run; so may be one
    engine's fallback where only another's had a question left.
    """
    for each in rounds:
        names = [name for name in each.order if name in live]
        if not names:
            return
        yield replace(
            each,
            order=tuple(names),
            run_us={name: each.run_us[name] for name in names},
            host_us={name: each.host_us[name] for name in names},
            prepare_us={name: each.prepare_us[name] for name in names},
            calls={name: each.calls[name] for name in names},
        )
