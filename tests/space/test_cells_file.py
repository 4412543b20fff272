"""Single cells of a space, named in a file: by id, or as every message writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.space import Grid, SpaceError, expand, load_engine, load_profile
from autotune.space.cells_file import read_cells


@pytest.fixture(scope="module")
def grid() -> Grid:
    return expand(load_profile("h200"), load_engine("sglang"))


def test_both_spellings_comments_and_order(grid: Grid, tmp_path: Path) -> None:
    cells = [item.cell for item in grid.cells]
    path = tmp_path / "cells.txt"
    path.write_text(f"# a panel\n\n{cells[700]}   # by its words\n {cells[3].id} # {cells[3]}\n")
    ids = read_cells(path, cells)
    assert ids == [cells[700].id, cells[3].id]
    part = grid.pick(ids)
    # in the grid's order, with the models that call them, each column with its own rows
    assert list(part.cells) == [grid.cells[3], grid.cells[700]]
    assert part.whole is grid and part.pick(ids[:1]).whole is grid
    assert all(len(entry.columns) == len(entry.rows) == 1 for entry in part.entries)


def test_a_ragged_part_has_no_cell_more(grid: Grid) -> None:
    column = grid.columns[0]
    rows = [item.cell for item in grid.cells if item.cell.column == column]
    other = next(item.cell for item in grid.cells if item.cell.column != column)
    wanted = {rows[0].id, rows[2].id, other.id}
    assert {item.cell.id for item in grid.pick(wanted).cells} == wanted
    with pytest.raises(SpaceError, match="there is no cell 000000000000"):
        grid.pick(["000000000000"])
    with pytest.raises(SpaceError, match="no cell is picked"):
        grid.pick([])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nothing\n", "names no cell"),
        ("0123456789ab\n", "line 1: '0123456789ab': no cell of this space, engine and filters has that id"),
        (
            "\n8/1/9 batch 2\n",
            "line 2: '8/1/9 batch 2': no cell of this space, engine and filters is written",
        ),
        ("{0}\n{0}\n", "line 1 names this cell already"),
    ],
)
def test_refusals_are_one_line(text: str, said: str, grid: Grid, tmp_path: Path) -> None:
    path = tmp_path / "cells.txt"
    path.write_text(text.format(grid.cells[0].cell.id))
    with pytest.raises(SpaceError) as refused:
        read_cells(path, [item.cell for item in grid.cells])
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_words_that_several_cells_share_name_none(grid: Grid, tmp_path: Path) -> None:
    cell = grid.cells[0].cell
    shape = replace(cell.column.shape, window_left=64)  # no part of what is written
    twin = replace(cell, column=replace(cell.column, shape=shape))
    path = tmp_path / "cells.txt"
    path.write_text(f"{cell}\n")
    with pytest.raises(SpaceError, match=f"2 cells are written so; name one by its id: {cell.id}, {twin.id}"):
        read_cells(path, [cell, twin])
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpaceError, match=r"codec can.t decode"):
        read_cells(path, [cell])
    with pytest.raises(SpaceError, match="No such file"):
        read_cells(tmp_path / "none.txt", [cell])
