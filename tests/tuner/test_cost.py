from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.tuner.cost import call_seconds, predict, predict_again, predict_all, predict_proof

COLUMN = Column(Shape(8, 1, 128, 16), PROFILES["bf16"], 4, 16, 4096)
CELL = Cell(COLUMN, 1025, 4096)


def test_call_of_a_known_cell_within_a_factor_of_two() -> None:
    # batch 16, kv 4096, bf16: 13-19 ms on the machine of the fit, q_len 1-8; batch 1, kv 256: 0.05-0.1 ms
    assert 8e-3 < call_seconds(CELL, "cpu") < 30e-3
    small = Cell(replace(COLUMN, batch_size=1), 8, 256)
    assert 50e-6 < call_seconds(small, "cpu") < 250e-6
    # H200, batch 64, kv 8192, bf16, head_dim 128: 87-90 microseconds
    large = Cell(replace(COLUMN, batch_size=64, max_context=8192), 4096, 8192)
    assert call_seconds(large, "cuda") == pytest.approx(90e-6, rel=0.2)


def test_more_work_never_costs_less() -> None:
    for device in ("cpu", "cuda:0"):
        base = predict(CELL, device)
        assert predict(Cell(replace(COLUMN, batch_size=64), 1025, 4096), device) >= base
        assert predict(Cell(replace(COLUMN, batch_size=1), 1025, 4096), device) <= base
        assert predict(Cell(COLUMN, 4, 256), device) <= base
        assert predict(CELL, device, routes=4) > base
        assert predict_proof(COLUMN, device, routes=4) == pytest.approx(2 * predict_proof(COLUMN, device))
    fp32 = replace(COLUMN, dtypes=PROFILES["fp32"])
    assert predict(Cell(fp32, 1025, 4096), "cpu") > predict(CELL, "cpu")


def test_cheapest_first_on_the_cpu() -> None:
    cells = [
        Cell(replace(COLUMN, batch_size=batch), low, high)
        for batch in (1, 4, 16)
        for low, high in ((4, 256), (257, 1024), (1025, 4096))
    ]
    order = sorted(cells, key=lambda cell: predict(cell, "cpu"))
    assert (order[0].column.batch_size, order[0].kv_high) == (1, 256)
    assert order[-1] == CELL


def test_no_cell_costs_less_than_its_start_up() -> None:
    tiny = Cell(replace(COLUMN, batch_size=1, q_len=1), 1, 16)
    assert predict(tiny, "cpu") > 0.2
    assert predict(tiny, "cuda") > 0.2


def test_a_window_bounds_the_work() -> None:
    shape = replace(COLUMN.shape, window_left=127)
    short, long = (
        call_seconds(Cell(replace(COLUMN, shape=shape), 1025, high), "cpu") for high in (1025, 4096)
    )
    assert short == long < call_seconds(CELL, "cpu")


def test_a_column_is_proven_once_for_all_its_rows() -> None:
    rows = [Cell(COLUMN, 4, 1024), CELL]
    assert predict_all(rows, "cpu") == pytest.approx(
        predict_proof(COLUMN, "cpu") + sum(predict(row, "cpu") for row in rows)
    )
    assert predict_all([], "cpu") == 0.0


def test_an_unknown_device_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="no cost model for device 'tpu'; there is one for: cpu, cuda"):
        predict(CELL, "tpu")


def _rows(count: int) -> list[Cell]:
    return [Cell(replace(COLUMN, batch_size=1 + index), 1025, 4096) for index in range(count)]


def test_second_timings_are_those_of_the_sample() -> None:
    # four cells bound no median; from five on all are drawn, up to 24
    assert [predict_again(_rows(count), "cpu").cells for count in (0, 4, 5, 23, 24, 60)] == [
        0,
        0,
        5,
        23,
        24,
        24,
    ]
    # a study that is not at its end has drawn fewer
    assert [predict_again(_rows(count), "cpu", last=False).cells for count in (23, 24, 60)] == [0, 8, 12]
    few = predict_again([CELL] * 5, "cpu")
    # 16 rounds each on the CPU, 20 in a typical decision
    assert 5 * 0.5 * predict(CELL, "cpu") < few.seconds < 5 * predict(CELL, "cpu")
    assert few.near > predict(CELL, "cpu")
    assert predict_again([], "cpu").seconds == predict_again(_rows(4), "cpu").seconds == 0.0


def test_a_child_of_a_gpu_costs_more_than_its_cells() -> None:
    tiny = Cell(replace(COLUMN, batch_size=1), 4, 256)
    found = predict_again([tiny] * 24, "cuda:0", routes=3)
    assert 6 * 3.0 < found.seconds < 6 * 3.0 + 24 * 2 * predict(tiny, "cuda", routes=3)
    assert 3.0 < found.near < 5.0
    with pytest.raises(ValueError, match="no cost model"):
        predict_again([tiny], "tpu")
