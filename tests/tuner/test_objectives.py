"""Every declared objective is resolved before a cell is settled; the first decides the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.bench.record import Round
from autotune.domain.decision import Reason
from autotune.hardware.collect import collect
from autotune.tuner.objectives import Objectives
from autotune.tuner.publish import build, decide_all, publish
from autotune.tuner.run import multiplicity, study_digest
from autotune.tuner.target import Target
from tests.tuner.scripted import ScriptedWorker, opened, routes, sweep, target

FAST = routes("fast")


def declaring(*names: str) -> Target:
    """The tiny space with these objectives, on this CPU: a table names its machine."""
    place = target()
    space = replace(place.grid.space, objectives=names)
    return replace(place, grid=replace(place.grid, space=space), facts=collect("cpu"))


class Preparing(ScriptedWorker):
    """``fast`` is fast to run and slow to prepare."""

    prepare_us = 1000.0

    def _round(self, index: int, live: tuple[str, ...]) -> Round:
        one = super()._round(index, live)
        return replace(one, prepare_us={name: self.prepare_us if name == "fast" else 1.0 for name in live})


def test_layers_of_the_space(tmp_path: Path) -> None:
    place = target()
    assert Objectives.of_grid(place.grid).layers(place.grid.columns[0]) == 80
    (entry,) = place.grid.entries
    model = entry.uses[0].model
    kind = replace(entry.uses[0].layer_kind, layers=12)
    other = replace(entry.uses[0], model=replace(model, name="shallow"), layer_kind=kind)
    shared = Objectives(("graph", "step"), [replace(entry, uses=(*entry.uses, other))])
    assert shared.layers(place.grid.columns[0]) == 12
    assert list(shared.of(place.grid.columns[0])) == ["graph", "step"]


@pytest.mark.parametrize("names", [(), ("graph", "joules")])
def test_an_unknown_objective(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="must be of graph, step"):
        Objectives(names, [])


@pytest.mark.parametrize(
    ("names", "answer", "reason"),
    [
        (("graph", "step"), "fast", Reason.PROVEN_FASTER),
        (("step", "graph"), None, Reason.NOT_FASTER),
        (("step",), None, Reason.NOT_FASTER),
    ],
)
def test_the_first_decides_the_table(
    names: tuple[str, ...], answer: str | None, reason: Reason, tmp_path: Path
) -> None:
    worker = Preparing(times={"fast": 5.0, "torch-sdpa": 10.0})
    with opened(tmp_path, FAST, declaring(*names)) as run:
        assert sweep(run, worker).settled == 4
        # (1000 + 80 x 5) / (1 + 80 x 10): slower in a step
        assert {(cell.decision.route, cell.decision.reason) for cell in decide_all(run)} == {(answer, reason)}
        assert build(run)[0].policy.objective == names[0]
        states = run.repository.timings(run.study, run.cells[0].cell)[0].summary
        wanted: dict[str, Any] = {"graph": "claim", "step": "drop"}
        assert {name: seen["state"] for name, seen in states.items()} == {
            name: wanted[name] for name in names
        }
        # the other declared one, from the same rounds
        if len(names) == 2:
            other = publish(run, tmp_path, names[1])
            assert other.table.policy.objective == names[1]
            assert {cell.decision.route for cell in other.cells} == {None if answer else "fast"}


def test_rounds_run_until_every_objective_is_resolved(tmp_path: Path) -> None:
    class Close(Preparing):
        prepare_us = 401.0

        def _round(self, index: int, live: tuple[str, ...]) -> Round:
            one = super()._round(index, live)
            # a step now above the margin, now below: (1 + 800) / (401 + 400), or 20 us more for the fallback
            more = dict(one.prepare_us)
            more["torch-sdpa"] = 101.0 if index % 2 else 1.0
            return replace(one, prepare_us=more)

    times = {"fast": 5.0, "torch-sdpa": 10.0}
    with opened(tmp_path / "graph", FAST, declaring("graph")) as run:
        sweep(run, Close(times=times), trials=1)
        alone = len(run.repository.rounds(run.study, run.cells[0].cell))
    with opened(tmp_path / "both", FAST, declaring("graph", "step")) as run:
        sweep(run, Close(times=times), trials=1)
        cell = run.cells[0].cell
        assert 128 > len(run.repository.rounds(run.study, cell)) > alone  # until no claim is left to be had
        assert run.judge.settled(cell)
        assert run.judge.outcome(cell).decision.route == "fast"
        assert run.judge.outcome(cell, objective="step").decision.reason is Reason.UNDECIDED
        summary = {row.route: row.summary for row in run.repository.timings(run.study, cell)}["fast"]
        assert (summary["graph"]["state"], summary["step"]["state"]) == ("claim", "exhausted")


def test_layers_belong_to_a_study_that_counts_them() -> None:
    def deeper(place: Target) -> Target:
        entries = tuple(
            replace(
                entry,
                uses=tuple(replace(u, layer_kind=replace(u.layer_kind, layers=7)) for u in entry.uses),
            )
            for entry in place.grid.entries
        )
        return replace(place, grid=replace(place.grid, entries=entries))

    graph, both = declaring("graph"), declaring("graph", "step")
    assert study_digest(graph, FAST) == study_digest(deeper(graph), FAST)
    assert study_digest(both, FAST) != study_digest(deeper(both), FAST)
    assert multiplicity(both, FAST) == 2 * multiplicity(graph, FAST)


def test_step_is_not_weighed_where_no_model_has_layers() -> None:
    place = declaring("graph", "step")
    column = place.grid.columns[0]
    here = Objectives.of_grid(place.grid)
    nowhere = Objectives(("graph", "step"), ())
    assert here.weighs("step", column) and nowhere.weighs("graph", column)
    assert not nowhere.weighs("step", column)
    assert nowhere.weighed(15, 0.0).weighs("step", column)
    with pytest.raises(KeyError):
        nowhere.one("step", column)
