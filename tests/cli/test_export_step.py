"""``autotune export --objective step --layers N --hidden-prepare SHARE``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.bench.record import Round
from autotune.hardware.collect import collect
from autotune.table.dump import write_table
from autotune.table.errors import TableError
from autotune.table.load import load_table
from autotune.tuner.objectives import Objectives
from autotune.tuner.publish import build, publish
from autotune.tuner.undecided import undecided
from tests.console import Place, cli
from tests.table import samples
from tests.tuner.scripted import ScriptedWorker, opened, routes, sweep, target

FAST = routes("fast")


class Preparing(ScriptedWorker):
    """``fast`` runs in half the time and prepares for 50 us more."""

    def _round(self, index: int, live: tuple[str, ...]) -> Round:
        one = super()._round(index, live)
        return replace(one, prepare_us={name: 51.0 if name == "fast" else 1.0 for name in live})


@pytest.mark.parametrize(
    ("layers", "hidden", "answer"),
    [
        (None, 0.0, "fast"),  # the model's 80: 801 against 451
        (5, 0.0, None),  # 51 against 76
        (6, 0.5, "fast"),  # 60.5 against 55.5
        (20, 0.0, "fast"),  # 201 against 151
        (1, 1.0, "fast"),  # 10 against 5
    ],
)
def test_the_weights_decide(layers: int | None, hidden: float, answer: str | None, tmp_path: Path) -> None:
    space = replace(target().grid.space, objectives=("graph", "step"))
    place = replace(target(), facts=collect("cpu"))
    place = replace(place, grid=replace(place.grid, space=space))
    with opened(tmp_path, FAST, place) as run:
        sweep(run, Preparing(times={"fast": 5.0, "torch-sdpa": 10.0}))
        run.weigh(layers, hidden)
        found = publish(run, tmp_path, "step")
        assert {cell.decision.route for cell in found.cells} == {answer}
        policy = load_table(found.path).policy
        assert (policy.objective, policy.layers, policy.hidden_prepare) == ("step", layers, hidden or None)
        assert ("layers:" in found.path.read_text()) == (layers is not None)
        # weights belong to step: a table by graph does not know them
        other, _ = build(run, "graph")
        assert (other.policy.layers, other.policy.hidden_prepare) == (None, None)


def test_undecided_cells_are_counted(tmp_path: Path) -> None:
    """4 rounds a report: graph is resolved after 16, step with one layer goes either way by then."""

    class Either(ScriptedWorker):
        def _round(self, index: int, live: tuple[str, ...]) -> Round:
            one = super()._round(index, live)
            return replace(
                one,
                prepare_us={"fast": 5.0, "torch-sdpa": 5.0 if index % 2 else 0.0},
            )

    space = replace(target().grid.space, objectives=("graph", "step"))
    place = replace(target(), facts=collect("cpu"))
    with opened(tmp_path, FAST, replace(place, grid=replace(place.grid, space=space))) as run:
        sweep(run, Either(times={"fast": 5.0, "torch-sdpa": 10.0}))
        assert undecided(run, "graph").cells == undecided(run, "step").cells == 0
        run.weigh(1, 0.0)  # (0 or 5) + 10 against 5 + 5: now above the margin, now a tie
        left = undecided(run, "step")
        assert (left.stopped, left.exhausted, left.cells) == (4, 0, 4)
        assert undecided(run, "graph").cells == 0
        assert build(run, "step")[0].entries[0].routes.rows[0].letters == "??"


@pytest.mark.parametrize(("layers", "hidden"), [(0, 0.0), (-1, 0.0), (1, 1.5), (1, -0.1), (1, float("nan"))])
def test_weights_that_make_no_sense(layers: int, hidden: float) -> None:
    with pytest.raises(ValueError, match="layers must be at least 1"):
        Objectives(("step",), (), chosen_layers=layers, hidden=hidden)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layers", "15"], "add --objective step"),
        (["--hidden-prepare", "0.5"], "add --objective step"),
        (["--objective", "graph", "--layers", "15"], "add --objective step"),
        (["--objective", "step", "--layers", "0"], "--layers"),
        (["--objective", "step", "--hidden-prepare", "1.5"], "--hidden-prepare 1.5: a share from 0 to 1"),
        (["--objective", "step", "--hidden-prepare", "nan"], "--hidden-prepare nan: a share from 0 to 1"),
    ],
)
def test_a_wrong_export(flags: list[str], said: str, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    text = Path(__file__).parents[1].joinpath("data/spaces/tiny.yaml").read_text()
    space.write_text(text.replace('["graph"]', '["graph", "step"]'))
    result = cli("export", "--space", space, "--db", f"sqlite:///{tmp_path}/none.db", *flags)
    assert result.code == 2
    assert said in result.line


def test_the_command(done: Place) -> None:
    graph = cli("export", *done.flags(), "--objective", "graph", "--json")
    assert graph.code == 0, graph.err
    assert graph.json["undecided"]["stopped"] == 0
    assert (graph.json["layers"], graph.json["hidden_prepare"]) == (None, None)
    assert "decided by graph: " in cli("export", *done.flags(), "--objective", "graph").out
    # without the flag nothing is said of it, and nothing is computed twice
    assert cli("export", *done.flags(), "--json").json["undecided"] is None


def test_what_people_read_names_the_weights(tmp_path: Path) -> None:
    policy = samples.POLICY._replace(layers=15, hidden_prepare=0.5)
    path = tmp_path / "table.yaml"
    write_table(samples.table_of(samples.sample_cells(), policy=policy), path)
    assert "objective step (15 layers, 50 % of prepare hidden)" in cli("show", path).out
    call = ["--heads", "8/1/128", "--batch", "2", "--q-len", "4", "--kv", "100", "--facts", "table"]
    assert "decided by step (15 layers, 50 % of prepare hidden)" in cli("explain", path, *call).out
    assert cli("explain", path, *call, "--json").json["policy"]["layers"] == 15
    assert cli("show", path, "--json").json["policy"]["hidden_prepare"] == 0.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "policy.layers"),
        ({"hidden_prepare": 1.5}, "policy.hidden_prepare"),
        ({"hidden_prepare": float("nan")}, "policy.hidden_prepare"),
        ({"objective": "graph", "layers": 15}, "belong to the objective step only"),
        ({"objective": "graph", "hidden_prepare": 0.5}, "belong to the objective step only"),
    ],
)
def test_a_policy_that_makes_no_sense(changes: dict[str, float], said: str) -> None:
    with pytest.raises(TableError, match=said):
        samples.table_of(samples.sample_cells(), policy=samples.POLICY._replace(**changes))  # type: ignore[arg-type]
