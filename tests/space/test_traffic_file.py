from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.domain.traffic import ShapeCount, bucket
from autotune.engines.traffic import Traffic
from autotune.space.errors import SpaceError
from autotune.space.traffic import read_traffic, weigh

COLUMN = Column(Shape(8, 1, 128, 16), PROFILES["bf16"], 4, 8, 3000)
ROWS = ((4, 256), (257, 2048), (2049, 3000))
INSIDE = replace(COLUMN, batch_size=5, interval=(1, 8))


def cells(column: Column = COLUMN) -> list[Cell]:
    return [Cell(column, low, high) for low, high in ROWS]


counts = st.builds(
    ShapeCount,
    batch=st.integers(1, 512),
    q_len=st.integers(1, 8),
    kv=st.none() | st.integers(0, 17).map(lambda power: 1 << power),
    count=st.integers(1, 10**9),
)


@given(counts)
def test_a_line_comes_back(shape: ShapeCount) -> None:
    assert ShapeCount.parse(shape.line()) == shape


@given(st.text())
def test_any_other_line_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON|must be an object"):
        ShapeCount.parse(text)


@given(st.lists(counts, min_size=1))
def test_no_call_is_lost(shapes: list[ShapeCount]) -> None:
    found = weigh(shapes, cells() + cells(INSIDE))
    assert found.calls == sum(shape.count for shape in shapes)
    # captured and eager never take the same call, so what the cells got is what matched
    assert sum(found.by_cell.values()) == pytest.approx(found.calls - found.unmatched)


@given(st.integers(1, 3000))
def test_a_length_is_counted_in_its_row_or_where_its_bucket_ends(length: int) -> None:
    found = weigh([ShapeCount(8, 4, bucket(max(4, length)), 1)], cells())
    (taken,) = [cell for cell in cells() if cell.id in found.by_cell]
    assert taken.kv_low <= min(bucket(max(4, length)), 3000) <= taken.kv_high


def test_what_an_engine_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    traffic = Traffic(path)
    for _ in range(3):
        traffic.count(8, 4, 1000)
    traffic.count(2, 1, None)
    traffic.write()
    assert read_traffic(path) == (ShapeCount(8, 4, 1024, 3), ShapeCount(2, 1, None, 1))


def test_containment() -> None:
    short, middle, long = cells()
    shapes = [
        ShapeCount(8, 4, 256, 1),
        ShapeCount(8, 4, 512, 10),
        ShapeCount(8, 4, 4096, 100),  # lengths of 2049..4096, of which 3000 is the most there can be
    ]
    assert weigh(shapes, cells()).by_cell == {short.id: 1, middle.id: 10, long.id: 100}
    # no length: every row alike
    assert set(weigh([ShapeCount(8, 4, None, 6)], cells()).by_cell.values()) == {2.0}
    # captured: the column itself, never the interval around it; else inside the interval
    both = cells() + cells(INSIDE)
    exact = weigh([ShapeCount(8, 4, 256, 1)], both).by_cell
    inside = weigh([ShapeCount(6, 4, 256, 1)], both).by_cell
    assert set(exact) == {short.id}
    assert set(inside) == {cells(INSIDE)[0].id}


def test_what_matches_no_cell_is_said() -> None:
    shapes = [ShapeCount(8, 4, 256, 75), ShapeCount(16, 4, 256, 20), ShapeCount(8, 2, 256, 4)]
    shapes.append(ShapeCount(8, 4, 1 << 17, 1))
    found = weigh(shapes, cells())
    assert (found.calls, found.unmatched) == (100, 25)
    assert found.said == "traffic: 100 calls in 1 cells; 25 of them (25%) match no cell of this space"
    assert weigh(shapes[:1], cells()).said == "traffic: 75 calls in 1 cells"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object with batch, q_len, kv, count"),
        ('{"batch": 1, "q_len": 1, "kv": 8}', "count: missing"),
        ('{"batch": 0, "q_len": 1, "kv": 8, "count": 1}', "batch: must be a positive integer, not 0"),
        ('{"batch": 1, "q_len": 1.5, "kv": 8, "count": 1}', "q_len: must be a positive integer, not 1.5"),
        (
            '{"batch": 1, "q_len": 1, "kv": true, "count": 1}',
            "kv: must be a positive integer or null",
        ),
        ('{"batch": 1, "q_len": null, "kv": 8, "count": 1}', "q_len: must be a positive integer, not null"),
        (
            '{"batch": 1, "q_len": 1, "kv": 8, "count": 1, "n": 2}',
            "n: unknown key; allowed: batch",
        ),
    ],
)
def test_a_malformed_line(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    path.write_text(f"{ShapeCount(1, 1, None, 1).line()}\n\n{line}\n", "utf-8")
    with pytest.raises(SpaceError) as caught:
        read_traffic(path)
    assert str(caught.value).startswith(f"{path} line 3: {said}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "shapes.jsonl"
    with pytest.raises(SpaceError, match="No such file"):
        read_traffic(path)
    path.write_bytes(b"\n \n")
    with pytest.raises(SpaceError, match="no shape in it"):
        read_traffic(path)
    path.write_bytes(b"\xff")
    with pytest.raises(SpaceError, match=r"not UTF-8 text \(byte 0\)"):
        read_traffic(path)
