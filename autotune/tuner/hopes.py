"""What a cell promises, from what has been timed and proven so far.

A gain is log(time(fallback) / time(candidate)) beyond log(1 + margin), forecast from the cells timed so far
(:mod:`autotune.tuner.forecast`), or as measured in the cell itself: by its rounds, else by its look
(:mod:`autotune.tuner.scout`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import log, log1p, sqrt
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from autotune.bench.record import Round
from autotune.domain.verdict import Status
from autotune.tuner.cost import predict_proof
from autotune.tuner.forecast import Features, Ridge, expected_gain, normal_cdf
from autotune.tuner.scout import ROUNDS

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.routes.base import Route
    from autotune.store.records import StudyCell
    from autotune.tuner.forecast import Array
    from autotune.tuner.run import OpenedRun

# (cell number, route): what is out of consideration there
Tried: TypeAlias = "Container[tuple[int, str]]"
Ratios: TypeAlias = "Mapping[tuple[int, str, str], tuple[float, float]]"


@dataclass(slots=True)
class Standing:
    """What is known of a column's routes.

    ``pairs``: an engine's fallback and the candidates that could win its cells; ``owed``: the share of a
    column's checks that is missing, by route; ``proof_s``: predicted for all checks of one route.
    """

    pairs: tuple[tuple[str, tuple[str, ...]], ...]
    owed: Mapping[str, float]
    proof_s: float


@dataclass(frozen=True, slots=True)
class Hope:
    """What a cell promises.

    Attributes:
        gain: expected, summed over the engines.
        winners: the likely winner of each engine.
        rivals: other candidates that could be.
        in_vain: the chance that no likely winner passes the margin.
        misled: the chance that a rival is faster than the likely winner.
        timed: whether the gain was measured in the cell itself.
    """

    gain: float = 0.0
    winners: frozenset[str] = frozenset()
    rivals: frozenset[str] = frozenset()
    in_vain: float = 1.0
    misled: float = 0.0
    timed: bool = False


@dataclass(slots=True)
class _Times:
    """Microseconds by route, of one cell and one source, and the variance of their logs' differences."""

    by_route: Mapping[str, float]
    variance: float


class Hopes:
    """What is known of a study's cells, and what it makes them promise."""

    def __init__(self, run: OpenedRun) -> None:
        self._run = run
        self._threshold = log1p(run.study.margin)
        self._features = Features(item.cell for item in run.cells)
        self._rows = {item.number: self._features.row(item.cell) for item in run.cells}
        self._times: dict[int, list[_Times]] = {}
        self.looks: dict[int, Mapping[str, float]] = {}
        self._standings: dict[str, Standing] = {}  # by column id

    def start(self, looks: Mapping[int, Mapping[str, float]]) -> None:
        """Read what the study's rows say: rounds, and ``looks`` by cell number."""
        self._times.clear()
        self.looks = dict(looks)
        known = self._run.repository.trials(self._run.study)
        for item in self._run.cells:
            if item.number in self.looks or item.cell.id in known:
                self.read(item)

    def standing(self, column: Column) -> Standing:
        """What was last read of a column; KeyError where :meth:`stand` never was called."""
        return self._standings[column.id]

    def of(self, items: Sequence[StudyCell], tried: Tried) -> dict[int, Hope]:
        """What cells promise, by number, each pair of routes forecast for all of them at once.

        Args:
            tried: (cell number, route) that were settled with in vain: out of consideration.
        """
        pairs: dict[tuple[str, str], list[int]] = {}
        for item in items:
            for fallback, name in self._pairs_of(item, tried):
                pairs.setdefault((fallback, name), []).append(item.number)
        ratios: dict[tuple[int, str, str], tuple[float, float]] = {}
        for (fallback, name), numbers in pairs.items():
            fit = self._fit(fallback, name)
            means, variances = fit.predict(np.array([self._rows[n] for n in numbers]))
            for number, mean, variance in zip(numbers, means, variances, strict=True):
                seen = self._ratio(number, fallback, name)
                ratios[number, fallback, name] = seen or (float(mean), float(variance))
        return {item.number: self._hope(item, tried, ratios) for item in items}

    def _pairs_of(self, item: StudyCell, tried: Tried) -> list[tuple[str, str]]:
        return [
            (fallback, name)
            for fallback, names in self._standings[item.cell.column.id].pairs
            for name in names
            if (item.number, name) not in tried
        ]

    def _hope(
        self,
        item: StudyCell,
        tried: Tried,
        ratios: Ratios,
    ) -> Hope:
        number = item.number
        by_fallback: dict[str, list[str]] = {}
        for fallback, name in self._pairs_of(item, tried):
            by_fallback.setdefault(fallback, []).append(name)
        gain, in_vain, misled, timed = 0.0, 1.0, 0.0, True
        winners: set[str] = set()
        rivals: set[str] = set()
        for fallback, names in by_fallback.items():
            gains = {n: expected_gain(*ratios[number, fallback, n], self._threshold) for n in names}
            best = max(names, key=lambda n: (gains[n], n))
            mean, variance = ratios[number, fallback, best]
            gain += gains[best]
            winners.add(best)
            rivals |= set(names) - {best}
            in_vain *= normal_cdf((self._threshold - mean) / sqrt(variance))
            for name in set(names) - {best}:
                other, spread = ratios[number, fallback, name]
                misled = max(misled, normal_cdf((other - mean) / sqrt(variance + spread)))
            timed = timed and self._ratio(number, fallback, best) is not None
        if not winners:
            return Hope()
        return Hope(gain, frozenset(winners), frozenset(rivals - winners), in_vain, misled, timed)

    def _fit(self, fallback: str, name: str) -> Ridge:
        numbers = [n for n in self._times if self._ratio(n, fallback, name) is not None]
        values = [ratio[0] for n in numbers if (ratio := self._ratio(n, fallback, name)) is not None]
        rows: Array = np.array([self._rows[n] for n in numbers]).reshape(len(numbers), self._features.width)
        return Ridge(rows, np.array(values))

    def _ratio(self, number: int, fallback: str, name: str) -> tuple[float, float] | None:
        """Mean and variance of the log ratio as timed in the cell; rounds before looks."""
        for times in self._times.get(number, ()):
            if fallback in times.by_route and name in times.by_route:
                return log(times.by_route[fallback] / times.by_route[name]), times.variance
        return None

    def read(self, item: StudyCell) -> None:
        """Take over the times of the cell's stored rounds, and of its look.

        The variance of a look's log ratio is a guess, the floor of the margin squared; that of rounds follows
        from it. It weighs chances in the order of work and decides no answer.
        """
        judge, cell = self._run.judge, item.cell
        variance = self._run.study.margin**2  # of a look; more rounds know better
        objective = judge.objectives.of(cell.column)[judge.objectives.first]
        stored = [Round.from_dict(data) for data in self._run.repository.rounds(self._run.study, cell)]
        rounds = [each for each in stored if not each.dropped]
        found = []
        if rounds:
            names = dict.fromkeys(name for each in rounds for name in each.order)
            times = {n: median(objective(each, n) for each in rounds if n in each.run_us) for n in names}
            found.append(_Times(times, variance * ROUNDS / max(ROUNDS, len(rounds))))
        if look := self.looks.get(item.number):
            found.append(_Times(look, variance))
        if found:
            self._times[item.number] = found

    def stand(self, column: Column) -> None:
        """Read what is proven of a column."""
        run = self._run
        routes: dict[str, Route] = {}
        pairs = []
        for judge in run.judges:
            lineup = judge.lineup(column)
            if lineup.fallback is None or self._unsafe(lineup.fallback, column):
                continue
            names = [
                route.name
                for route in lineup.candidates
                if route.name in lineup.deployable and not self._unsafe(route, column)
            ]
            routes |= {route.name: route for route in lineup.runners}
            pairs.append((lineup.fallback.name, tuple(names)))
        owed = {name: run.book.owed(route, column, (), run.target.device) for name, route in routes.items()}
        proof_s = predict_proof(column, self._run.target.facts.device, 1)
        self._standings[column.id] = Standing(tuple(dict.fromkeys(pairs)), owed, proof_s)

    def _unsafe(self, route: Route, column: Column) -> bool:
        return self._run.book.verdict(route, column, self._run.target.device).status is Status.UNSAFE
