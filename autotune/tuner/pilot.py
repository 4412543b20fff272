"""Before a study is created: does one round tell about the next? Then its test counts blocks of rounds.

A few cheap cells are timed and the rounds are thrown away: no claim rests on them, so looking at them costs
nothing of the error rate, and the routes need no proof yet. What a pilot cannot find out leaves the unit at
a round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import log
from typing import TYPE_CHECKING, Any

from autotune.bench.eprocess import Unit
from autotune.bench.noise import AUTOCORRELATION_LIMIT, pooled_lag1
from autotune.bench.objective import paired_ratios
from autotune.bench.record import MIN_GROUP_MS, Round, RoundSettings
from autotune.tuner.cost import predict
from autotune.tuner.lineup import line_up
from autotune.tuner.prover import seed_of
from autotune.tuner.trouble import explain
from autotune.worker.base import Completed
from autotune.worker.jobs import TimeJob

if TYPE_CHECKING:
    from autotune.domain.cell import Cell
    from autotune.routes.base import Route
    from autotune.tuner.target import Target
    from autotune.worker.base import Outcome
    from autotune.worker.worker import Worker

# Three times 64 rounds tell an autocorrelation to 0.07: white noise passes the limit once in 400 studies.
CELLS = 3
ROUNDS = 64
# So many cells are tried: a route that cannot run here must not cost minutes.
ATTEMPTS = 5
# Half a second on the CPU; on CUDA a library may load its modules first.
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Pilot:
    """What a pilot found.

    Attributes:
        unit: of the test, for the study that is created next.
        lag1: pooled lag-1 autocorrelation of the log ratios; None if no rounds were had.
        rounds: timed and thrown away, all cells together.
        detail: in one line, for people.
    """

    unit: Unit
    lag1: float | None
    rounds: int
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"unit": self.unit.value, "lag1": self.lag1, "rounds": self.rounds, "detail": self.detail}


def run_pilot(worker: Worker, target: Target, routes: Mapping[str, Route]) -> Pilot:
    """Time the fallback against its first candidate in the cheapest cells, of different columns if it can be.

    Raises:
        WorkerError: no child can be had.
    """
    series: list[list[float]] = []
    failures: list[str] = []
    pairs = _pairs(target, routes)
    for cell, names in pairs[:ATTEMPTS]:
        outcome, rounds = _time(worker, target, cell, names)
        ratios = paired_ratios(rounds, *names)
        if isinstance(outcome, Completed) and len(ratios) > 2:
            series.append([log(ratio) for ratio in ratios])
        else:
            failures.append("it gave no rounds" if isinstance(outcome, Completed) else explain(outcome))
        if len(series) == CELLS:
            break
    if not series:
        why = failures[0] if failures else "no candidate beside the fallback"
        return Pilot(Unit.ROUND, None, 0, f"no pilot, the unit of the test is a round: {why}")
    lag1 = pooled_lag1(series)
    unit = Unit.BLOCK4 if lag1 > AUTOCORRELATION_LIMIT else Unit.ROUND
    count = sum(len(each) for each in series)
    meaning = "a round" if unit is Unit.ROUND else "the median of 4 rounds"
    return Pilot(
        unit,
        lag1,
        count,
        f"pilot of {count} rounds, {ROUNDS} a cell: autocorrelation {lag1:.2f}, "
        f"so the unit of the test is {meaning}",
    )


def _pairs(target: Target, routes: Mapping[str, Route]) -> list[tuple[Cell, tuple[str, str]]]:
    """(cell, (fallback, candidate)), cheapest first; a column comes again once each has come."""
    device = target.facts.device
    ranked = sorted(target.grid.cells, key=lambda item: (predict(item.cell, device), item.cell.id))
    turns: Counter[str] = Counter()
    cells: list[tuple[int, Cell]] = []
    for item in ranked:
        cells.append((turns[item.cell.column.id], item.cell))
        turns[item.cell.column.id] += 1
    found = []
    for _, cell in sorted(cells, key=lambda each: each[0]):
        lineup = line_up(cell.column, routes, target.engine, target.arch, target.facts, probe=lambda _: True)
        if lineup.fallback is not None and lineup.candidates:
            found.append((cell, (lineup.fallback.name, lineup.candidates[0].name)))
            if len(found) == ATTEMPTS:
                break
    return found


def _time(worker: Worker, target: Target, cell: Cell, names: tuple[str, str]) -> tuple[Outcome, list[Round]]:
    rounds: list[Round] = []

    def on_event(payload: Any) -> bool:
        rounds.extend(Round.from_dict(data) for data in payload["rounds"])
        return True

    settings = RoundSettings(min_group_ms=MIN_GROUP_MS[target.facts.device], max_rounds=ROUNDS, chunk=ROUNDS)
    job = TimeJob(
        routes=names,
        cell=cell.to_dict(),
        facts=target.facts.to_dict(),
        seed=seed_of(target.seed, cell.id, "pilot"),
        device=target.device,
        arena_kind="plain",
        settings=asdict(settings),
    )
    outcome = worker.run(job, timeout_s=TIMEOUT_S, step_timeout_s=TIMEOUT_S, on_event=on_event)
    return outcome, rounds
