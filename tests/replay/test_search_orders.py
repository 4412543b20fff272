"""The benchmark's oracle and its accounting, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from autotune.bench.eprocess import SignTest
from autotune.bench.objective import step
from autotune.bench.record import Round
from autotune.domain.cell import Cell
from autotune.replay.packing import pack
from autotune.replay.recording import RecordedTiming
from autotune.tuner.standing import Question
from benchmarks.adaptive import Costs, area, curve_of, least_timing, oracle_order, time_to
from tests.tuner.scripted import target

FIRST, SECOND = target().grid.columns
A, B = (item.cell for item in target().grid.cells if item.cell.column == FIRST)
C, D = (item.cell for item in target().grid.cells if item.cell.column == SECOND)
COSTS = Costs(
    {(FIRST, "base"): 6.0, (FIRST, "fast"): 4.0, (SECOND, "base"): 1.0, (SECOND, "fast"): 1.0},
    {(A.id, "fast"): 1.0},
    {A.id: 1.0, B.id: 2.0, C.id: 2.0, D.id: 8.0},
)


def both(_: Cell) -> tuple[str, ...]:
    return ("base", "fast")


def test_a_columns_proof_is_paid_once() -> None:
    gains = {A.id: 1.0, B.id: 2.0, C.id: 3.0, D.id: 0.0}
    # 10 s of proof, a launch of 1 s and 1 s of timing; then 2 s; then another column's 2 s and 2 s
    assert curve_of([A, B, C], gains, COSTS, both) == [(12.0, 1.0), (14.0, 3.0), (18.0, 6.0)]


def test_the_oracle_takes_the_densest_prefix_and_leaves_what_gains_nothing() -> None:
    # first column: A and B together 12 in 14 s, 0.86; alone 6 in 12 s at most. Second: C alone 2 in 4 s, 0.5
    gains = {A.id: 6.0, B.id: 6.0, C.id: 2.0, D.id: 0.0}
    assert {cell.id for cell in oracle_order([C, D, A, B], gains, COSTS, both)[:2]} == {A.id, B.id}
    assert oracle_order([C, D, A, B], gains, COSTS, both)[2:] == [C]


def test_the_second_from_which_on_a_gain_is_there() -> None:
    taken_back = [(1.0, 3.0), (2.0, 1.0), (4.0, 2.0), (5.0, 3.0), (6.0, 2.5)]
    assert [time_to(taken_back, gain) for gain in (1.0, 2.0, 3.0)] == [1.0, 4.0, None]
    curve = [(2.0, 1.0), (5.0, 3.0)]
    assert [time_to(curve, gain) for gain in (1.0, 2.0, 3.0, 3.5)] == [2.0, 5.0, 5.0, None]
    # a third of the gain from 2 to 5, all of it from 5 to 10
    assert area(curve, 3.0, 10.0) == pytest.approx((3.0 / 3.0 + 5.0) / 10.0)


def test_the_oracle_times_its_pair_until_every_objective_has_an_answer() -> None:
    names = ("base", "fast", "other")
    run_us = {"base": 20.0, "fast": 10.0, "other": 10.0}
    calls, host_us = dict.fromkeys(names, 1), dict.fromkeys(names, 5.0)

    def timing(prepare_us: float) -> RecordedTiming:
        prepares = [dict.fromkeys(names, prepare_us * (i % 2)) for i in range(12)]
        rounds = [Round(i, names, run_us, host_us, prepares[i], calls) for i in range(12)]
        return RecordedTiming(pack(rounds), ((4, 1.0), (4, 0.4), (4, 0.4)))

    test, pair, graph, stepped = SignTest(0.02, 1), ("base", "fast"), Question(), Question(step(1, 0.0))
    # two of three routes opened in 0.6 s; seven rounds claim, so two chunks, of which the pair's share is 3/4
    assert least_timing(timing(0.0), pair, test, [graph]) == pytest.approx(0.4 + 0.6)
    # under step every other round is level: no answer until the recorded rounds end
    assert least_timing(timing(1e6), pair, test, [graph, stepped]) == pytest.approx(0.4 + 0.9)
