"""``benchmarks/panel.py``: every value of every axis about equally often, and the shipped panel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.space import expand, load_engine, load_profile
from autotune.space.cells_file import read_cells
from benchmarks.panel import counts, main, spread

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "benchmarks" / "panels" / "h200-200.txt"


def test_the_shipped_panel_is_drawn_from_the_shipped_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu", "h200", "--engine", "sglang,generic", "--count", "200"]) == 0
    assert capsys.readouterr().out == SHIPPED.read_text()
    grid = expand(load_profile("h200"), load_engine("generic"))
    assert len(read_cells(SHIPPED, [item.cell for item in grid.cells])) == 200


def test_values_are_drawn_about_equally_often() -> None:
    cells = [item.cell for item in expand(load_profile("h200"), load_engine("sglang")).cells]
    for count, seed in ((200, 1), (200, 2), (37, 3)):
        panel = spread(cells, count, seed)
        assert len({cell.id for cell in panel}) == count
        assert panel == spread(cells[::-1], count, seed)  # by the seed, not by the order
        for name, values, least, most in counts(panel):
            assert most - least <= 2, (name, values, least, most)
    assert spread(cells, 200, 1) != spread(cells, 200, 2)
    assert len(spread(cells[:5], 200, 1)) == 5


def test_a_wrong_name_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/panel.py", "--gpu", "h999"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("panel: ") and done.stderr.count("\n") == 1
