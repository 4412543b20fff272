"""``benchmarks/record_rounds.py`` on this machine's CPU, and whom ``throughput.py --measure`` charges."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from benchmarks import noise, record_rounds, throughput
from benchmarks.recorded import read
from tests.console import TINY


def test_a_panel_is_drawn_by_its_seed_over_all_axes() -> None:
    shape = Shape(num_qo_heads=8, num_kv_heads=1, head_dim=128, page_size=16)
    cells = [
        Cell(Column(shape, PROFILES[profile], q_len, batch, 4096), q_len if kv == 1024 else 1025, kv)
        for profile in ("bf16", "fp8")
        for q_len in (1, 4)
        for batch in (1, 2, 4, 8, 16)
        for kv in (1024, 4096)
    ]
    panel = record_rounds.draw(cells, 6, 1)
    assert panel == record_rounds.draw(list(reversed(cells)), 6, 1)
    assert panel != record_rounds.draw(cells, 6, 2)
    assert len(set(panel)) == 6
    for axis in range(5):
        everything = {record_rounds.axes(cell)[axis] for cell in cells}
        assert {record_rounds.axes(cell)[axis] for cell in panel} == everything
    assert set(record_rounds.draw(cells, 100, 1)) == set(cells)


def test_recorded_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rounds.jsonl"
    flags = ["--space", str(TINY), "--cells", "2", "--processes", "2", "--rounds", "24", "--out", str(out)]
    assert record_rounds.main(flags) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["header", *["rounds"] * 4]
    assert lines[0]["routes"] == ["torch-sdpa", "torch-splitkv"]
    assert len(lines[0]["panel"]) == 2
    found = read(str(out))
    assert {item.process for item in found.items} == {"process 0", "process 1"}
    assert found.seed is not None
    for item in found.items:
        assert [each.index for each in item.rounds] == list(range(24))
        assert [each.index for each in item.start_up] == list(range(-1, -1 - len(item.start_up), -1))
        assert len(item.start_up) >= 4
        # the lengths of a round are drawn again from the seed, the same in every process
        lengths = item.log_lengths(found.seed)
        assert lengths is not None and len(lengths) == 24 and lengths.std() > 0
    one, two = (item for item in found.items if item.cell == found.items[0].cell)
    assert [each.order for each in one.rounds] == [each.order for each in two.rounds]
    assert noise.shifts(found)["torch-sdpa / torch-splitkv"].cells == 2
    capsys.readouterr()


def test_a_time_that_is_too_short_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rounds.jsonl"
    assert record_rounds.main(["--space", str(TINY), "--seconds", "0.01", "--out", str(out)]) == 1
    assert "more --seconds" in capsys.readouterr().err
    assert not out.exists()
    assert record_rounds.main(["--gpu", "none", "--out", str(out)]) == 2
    with pytest.raises(SystemExit) as stopped:
        record_rounds.main(["--gpu", "cpu", "--rounds", "0", "--out", str(out)])
    assert stopped.value.code == 2


def test_time_is_put_down_to_whoever_spent_it() -> None:
    meter = throughput.Meter()

    class Inner:
        def work(self) -> None:
            time.sleep(0.02)

    class Outer:
        def work(self) -> str:
            time.sleep(0.01)
            Inner().work()
            return "done"

    before = Outer.work
    with meter.watching(Inner, "inner"), meter.watching(Outer, "outer"):
        start = time.perf_counter()
        assert Outer().work() == "done"
        whole = time.perf_counter() - start
    assert Outer.work is before
    assert meter.calls == {"inner": 1, "outer": 1}
    assert meter.seconds["inner"] >= 0.02
    assert meter.seconds["outer"] >= 0.01
    assert sum(meter.seconds.values()) <= whole


def test_a_small_study_is_measured() -> None:
    found = throughput.measure(1, TINY)
    assert found.cells == 1
    assert found.rounds > 0
    assert found.calls["store"] > 10
    assert found.calls["Optuna"] >= 4
    assert 0 < sum(found.seconds.values()) < found.wall_s
    text = throughput.measured(found)
    assert "| store |" in text and "| Optuna |" in text and "1 cells" in text
