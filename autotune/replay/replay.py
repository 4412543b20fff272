"""A study run again from its recording: the real tuner, judge, prover, racer and queue, no device.

What is substituted is the worker (:mod:`autotune.replay.worker`), the deadline's clock and the self-test,
which is left out: nothing is measured, so nothing can be measured wrongly. Rows go to a database in memory
that ends with the replay. Equal arguments give an equal answer, to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any, cast

from autotune.replay.clock import RecordedClock
from autotune.replay.taus import recorded_taus
from autotune.replay.worker import RecordedWorker
from autotune.store.database import open_database
from autotune.tuner.adaptive import Adaptive
from autotune.tuner.crew import Crew
from autotune.tuner.deadline import Deadline
from autotune.tuner.listener import Several, Silent
from autotune.tuner.pace import Pace
from autotune.tuner.run import open_run
from autotune.tuner.tuner import Tuner

if TYPE_CHECKING:
    from autotune.domain.cell import Cell
    from autotune.domain.decision import Decision
    from autotune.replay.recording import Recording
    from autotune.routes.base import Route
    from autotune.store.records import StudyCell
    from autotune.tuner.judge import Judge
    from autotune.tuner.listener import Listener
    from autotune.tuner.target import Target
    from autotune.worker.worker import Worker

SCHEMA = "autotune/replay/1"
# Of seconds and gains in the document: the recording has no more of them.
DIGITS = 4


def gain_of(decision: Decision) -> float:
    """log(fallback's time / shipped choice's time), from the medians; 0 where that is the fallback."""
    if decision.route is None or decision.speedup is None:
        return 0.0
    return log(decision.speedup)


@dataclass(frozen=True)
class Settled:
    """A cell's answer under one engine, and whether it is final."""

    item: StudyCell
    decision: Decision
    final: bool


@dataclass(frozen=True)
class Replayed:
    """What came of a replay.

    Attributes:
        seconds: recorded time that passed.
        out_of_budget: whether the budget ended it.
        curve: (seconds, gain so far) after each cell that changed it: of the table that would be written
            then, by the first engine's decisions. A cell counts once its letter under the first objective
            names a route, whether or not another objective still wants rounds of it.
        answers: by engine, the run's own first; every cell asked for, in queue order.
        costs: by cell id, the seconds that passed while it was at work, its column's proof included where it
            was the first of its column.
        unrecorded: ids of cells that were begun and stay open for want of a recorded row.
        missing_checks, missing_timings: checks asked for that were not recorded; cells whose rounds ended
            before they were enough.
        margin: of the first engine and objective.
        taus: of the first engine, by objective; None: too few cells were timed again.
    """

    recording: Recording
    seconds: float
    out_of_budget: bool
    curve: tuple[tuple[float, float], ...]
    answers: Mapping[str, tuple[Settled, ...]]
    costs: Mapping[str, float]
    unrecorded: frozenset[str]
    missing_checks: int
    missing_timings: int
    margin: float
    taus: Mapping[str, float | None]

    @property
    def tau(self) -> float | None:
        """Of the first objective."""
        return next(iter(self.taus.values()))

    @property
    def gain(self) -> float:
        """Of all cells."""
        return self.curve[-1][1] if self.curve else 0.0

    def to_dict(self) -> dict[str, Any]:
        """What ``replay.json`` holds; no moment, no path, nothing of this machine."""
        study, facts = self.recording.study, self.recording.study.fingerprint.facts
        first = next(iter(self.answers.values()))
        return {
            "schema": SCHEMA,
            "recording": {
                "study": study.id,
                "hardware": facts.hardware.get("name"),
                "cells": len(self.recording.cells),
                "decided": len(self.recording.decisions),
                "seconds": round(self.recording.seconds, DIGITS),
            },
            "margin": self.margin,
            "tau": self.tau,
            "seconds": round(self.seconds, DIGITS),
            "out_of_budget": self.out_of_budget,
            "cells": len(first),
            "settled": sum(each.final for each in first),
            "not_recorded": {
                "cells": len(self.unrecorded),
                "checks": self.missing_checks,
                "timings": self.missing_timings,
            },
            "gain": {
                "total": round(self.gain, DIGITS),
                "over_seconds": [[round(x, DIGITS), round(y, DIGITS)] for x, y in self.curve],
            },
            "engines": {name: _engine(found) for name, found in self.answers.items()},
        }


def _engine(found: tuple[Settled, ...]) -> dict[str, Any]:
    reasons = Counter(each.decision.reason.value for each in found)
    routes = Counter(each.decision.route for each in found if each.decision.route is not None)
    return {
        "reasons": dict(sorted(reasons.items())),
        "routes": dict(sorted(routes.items())),
        "decisions": [
            {
                "cell": each.item.cell.id,
                "what": str(each.item.cell),
                "final": each.final,
                "route": each.decision.route,
                "reason": each.decision.reason.value,
                "detail": each.decision.detail,
                "speedup_low": each.decision.speedup_low,
                "speedup": each.decision.speedup,
                "vs_stock": each.decision.vs_stock,
            }
            for each in found
        ],
    }


def replay(
    recording: Recording,
    target: Target,
    routes: Mapping[str, Route],
    *,
    budget_s: float | None = None,
    trials: int | None = None,
    adaptive: bool = False,
    weights: Mapping[str, float] | None = None,
    recorded_only: bool = False,
    listener: Listener | None = None,
) -> Replayed:
    """Run the study of ``target`` from ``recording``.

    Args:
        target: the recorded machine's, with the recorded study's seed.
        routes: see :func:`autotune.replay.routes.recorded_routes`.
        budget_s: recorded seconds after which the call ends; None: no limit.
        trials: settle at most so many cells.
        adaptive: search as ``--strategy adaptive`` does; else settle all cells, cheapest first.
        weights: of cells by id, others 0; None: 1 each.
        recorded_only: leave out cells without a recorded round.
        listener: hears what it would hear of a run; its seconds are recorded ones.
    """
    clock = RecordedClock()
    recorder = RecordedWorker(recording, routes, clock)
    worker = cast("Worker", recorder)
    deadline = Deadline(budget_s, clock)
    watch = _Watch(clock, weights)
    with (
        open_database("sqlite://") as database,
        open_run(database, target, routes, tuning=True, like=recording.study) as run,
    ):
        if recorded_only:
            run.cells = tuple(item for item in run.cells if item.cell.id in recording.timings)
        for judge in run.judges:
            judge.lend(recorded_taus(recording, judge))
        # later processes are there from the start, as they were recorded, and none is asked for
        for item in run.cells:
            for process, each in enumerate(recording.again.get(item.cell.id, ()), 1):
                rounds = [one.to_dict() for one in each.rounds]
                run.rechecks.append(item.cell, process, 0, rounds, sampled=each.sampled)
        watch.letter = lambda cell: run.judge.known(cell).decision
        # one worker: what comes after what must not depend on threads
        pace = Pace()
        search = Adaptive(run, deadline, pace, 1, weights) if adaptive else None
        tuner = Tuner(
            run,
            Crew([worker]),
            worker,
            watch if listener is None else Several(watch, listener),
            deadline,
            trials,
            search,
            scout=worker,
            pace=pace,
            again=False,
        )
        progress = tuner.sweep()
        answers = {
            judge.target.engine.name: tuple(_settled(judge, item, search) for item in run.cells)
            for judge in run.judges
        }
        taus = {name: run.judge.tau(name) for name in run.judge.objectives.names}
        margin = run.judge.test_of().margin
    settled = next(iter(answers.values()))
    gain = sum(watch.weigh(each.item.cell) * gain_of(each.decision) for each in settled)
    if watch.curve and abs(watch.curve[-1][1] - gain) > 1e-9:  # a later cell changed what an earlier one says
        watch.curve.append((clock.now, gain))
    return Replayed(
        recording,
        clock.now,
        progress.out_of_budget,
        tuple(watch.curve),
        answers,
        watch.costs,
        frozenset(
            each.item.cell.id
            for each in settled
            if not each.final and each.item.cell.id in watch.costs and recorder.lacks(each.item.cell)
        ),
        len(recorder.missing_checks),
        len(recorder.missing_rounds),
        margin,
        taus,
    )


def _settled(judge: Judge, item: StudyCell, search: Adaptive | None) -> Settled:
    evidence = judge.evidence(item.cell)
    # an adaptive search leaves a candidate unproven where another one has won
    final = judge.settled(item.cell, evidence) if search is None else search.settled(item.cell)
    return Settled(item, judge.outcome(item.cell, evidence).decision, final)


class _Watch(Silent):
    """Notes what was gained when, and how long each cell took."""

    letter: Callable[[Cell], Decision]

    def __init__(self, clock: RecordedClock, weights: Mapping[str, float] | None) -> None:
        self._weights = weights
        self.curve: list[tuple[float, float]] = []
        self.costs: dict[str, float] = {}
        self._gains: dict[str, float] = {}
        self._clock = clock
        self._at: tuple[str, float] | None = None

    def weigh(self, cell: Cell) -> float:
        """Of the cell's gain."""
        return 1.0 if self._weights is None else self._weights.get(cell.id, 0.0)

    def cell_started(self, cell: Cell) -> None:
        self._close()
        self._at = (cell.id, self._clock.now)

    def cell_done(self, cell: Cell, decision: Decision) -> None:
        self._close()
        self.cell_again(cell, decision)

    def cell_left(self, cell: Cell) -> None:
        self._close()
        self.cell_again(cell, self.letter(cell))

    def cell_again(self, cell: Cell, decision: Decision) -> None:
        gain = self.weigh(cell) * gain_of(decision)
        if gained := gain - self._gains.get(cell.id, 0.0):
            self._gains[cell.id] = gain
            before = self.curve[-1][1] if self.curve else 0.0
            self.curve.append((self._clock.now, before + gained))

    def finished(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._at is not None:
            cell_id, began = self._at
            self.costs[cell_id] = self.costs.get(cell_id, 0.0) + self._clock.now - began
            self._at = None
