"""``--strategy``, ``--traffic`` and their place in ``plan`` and ``run``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autotune.domain.traffic import ShapeCount
from tests.console import TINY, Place, Result, cli, finished_run, script


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Result]:
    """A run of the tiny space by the other strategy."""
    return finished_run(lambda: tmp_path_factory.mktemp("finished"))


def traffic(folder: Path, *shapes: ShapeCount) -> Path:
    path = folder / "shapes.jsonl"
    path.write_text("".join(f"{shape.line()}\n" for shape in shapes), "utf-8")
    return path


def test_adaptive_on_real_kernels(tmp_path: Path, finished: tuple[Place, Result]) -> None:
    place = Place(tmp_path).with_selftest_of(finished[0])
    shapes = traffic(tmp_path, ShapeCount(2, 2, 128, 90), ShapeCount(7, 2, 64, 10))
    search = ("--strategy", "adaptive", "--budget", "120s", "--traffic", shapes, "--json")
    first = script("run", *place.flags(), *search, "--trials", "1", folder=tmp_path)
    assert first.code == 0, first.err
    assert "traffic: 100 calls in 1 cells; 10 of them (10%) match no cell of this space" in first.err
    # the one cell with traffic, by our sampler, in Optuna's own tables
    decided = place.rows("SELECT kv_high, column_id FROM decision JOIN cell USING (study_id, cell_id)")
    assert [high for high, _ in decided] == [128]
    axes = place.rows("SELECT value_json FROM trial_user_attributes WHERE key = 'batch_size'")
    assert axes and set(axes) == {("2",)}
    assert first.json["settled_by_this_call"] == 1
    seconds = first.json["seconds"]
    assert set(seconds) <= {"proof", "timing", "search"} and {"proof", "timing"} <= set(seconds)
    assert all(phase["actual_s"] > 0 and phase["predicted_s"] > 0 for phase in seconds.values())
    # the same study goes on, whole, by the other strategy
    second = cli("run", *place.flags(), "--json", "--budget", "120s")
    assert second.code == 0, second.err
    assert second.json["study"] == first.json["study"]
    assert second.json["settled"] == second.json["cells"] == 4
    assert place.completed() == [(number, 1) for number in range(4)]
    assert place.unended() == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--strategy", "adaptive"], "--strategy adaptive needs --budget, such as 10m"),
        (["--traffic", "x.jsonl"], "--traffic weighs the cells of --strategy adaptive"),
        (["--strategy", "adaptive", "--budget", "5m", "--traffic", "x.jsonl"], "x.jsonl: No such file"),
        (["--strategy", "random"], "'random' is not one of 'exhaustive', 'adaptive'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_what_does_not_go_together(command: str, flags: list[str], said: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    where = place.flags() if command == "run" else ["--space", str(TINY)]
    result = cli(command, *where, *flags)
    assert result.code == 2
    assert said in result.line
    assert not place.file.exists()


def test_a_malformed_line_and_traffic_that_is_elsewhere(tmp_path: Path) -> None:
    path = traffic(tmp_path, ShapeCount(2, 2, 128, 90))
    search = ("--space", TINY, "--strategy", "adaptive", "--budget", "5m", "--traffic", path)
    path.write_text(path.read_text("utf-8") + "{}\n", "utf-8")
    assert f"{path} line 2: batch: missing" in cli("plan", *search).line
    traffic(tmp_path, ShapeCount(2, 16, 128, 90))
    result = cli("plan", *search)
    assert result.code == 2
    assert "none of its 90 calls is in a cell of the space" in result.line


def test_plan(tmp_path: Path) -> None:
    whole = cli("plan", "--gpu", "h200", "--json").json
    assert (whole["strategy"], whole["cells_within_budget"]) == ("exhaustive", None)
    search = ("plan", "--gpu", "h200", "--strategy", "adaptive", "--budget", "10m")
    found = cli(*search, "--json").json
    assert found["estimated_seconds"] <= whole["estimated_seconds"]
    assert 0 < found["cells_within_budget"] < found["cells"]
    path = traffic(tmp_path, ShapeCount(16, 4, 8192, 5))
    weighed = cli(*search, "--traffic", path, "--json").json
    assert 0 < weighed["cells_with_traffic"] < weighed["cells"]
    assert weighed["calls_without_a_cell"] == 0
    assert weighed["estimated_seconds"] < found["estimated_seconds"]
    text = cli(*search)
    assert f"adaptive: about {found['cells_within_budget']} cells in 600 s" in text.out
