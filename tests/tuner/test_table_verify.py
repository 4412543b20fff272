"""A table is held against a fresh small study of its own cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from autotune.bench.eprocess import e_value
from autotune.bench.record import Round
from autotune.domain.decision import Decision, Reason
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import FailureKind
from autotune.hardware.collect import collect
from autotune.routes.base import Route
from autotune.space.engine import load_engine
from autotune.store.database import open_database
from autotune.table.errors import TableError
from autotune.table.model import RoutingTable
from autotune.tuner.answered import Answered, answered, draw
from autotune.tuner.crew import Crew
from autotune.tuner.deadline import Deadline
from autotune.tuner.listener import Silent
from autotune.tuner.publish import build
from autotune.tuner.regrid import regrid
from autotune.tuner.run import OpenedRun, open_run
from autotune.tuner.target import Target
from autotune.tuner.tuner import Tuner
from autotune.tuner.verify import (
    Finding,
    IncomparableError,
    Outcome,
    findings,
    require_same_fallbacks,
    route_names,
    strict,
)
from autotune.worker.worker import Worker
from tests.table import samples
from tests.tuner.scripted import ScriptedWorker, failed, opened, routes, sweep, target, unproven

FAST = routes("fast")
GAIN = {"fast": 5.0, "torch-sdpa": 10.0}
LOSS = {"fast": 20.0, "torch-sdpa": 10.0}
FACTS: Facts = collect("cpu", threads=1)
GENERIC = load_engine("generic")


@dataclass
class Wavering(ScriptedWorker):
    """``fast`` is now faster, now slower."""

    now: dict[str, float] = field(default_factory=lambda: dict(GAIN))

    def _round(self, index: int, live: tuple[str, ...]) -> Round:
        self.times = GAIN if index % 2 else LOSS
        return super()._round(index, live)


def made(
    folder: Path, worker: ScriptedWorker, known: dict[str, Route] = FAST, *, cells: int = 1
) -> RoutingTable:
    """The table of a run of so many of the four cells of the tiny space."""
    with opened(folder, known, replace(target(), facts=FACTS)) as run:
        sweep(run, worker, trials=cells)
        return build(run)[0]


def verified(
    folder: Path,
    table: RoutingTable,
    worker: ScriptedWorker,
    known: dict[str, Route] = FAST,
    sample: Sequence[Answered] | None = None,
    seconds: float | None = None,
) -> tuple[tuple[Finding, ...], OpenedRun]:
    """What ``autotune verify`` does once it has a worker."""
    drawn = answered(table) if sample is None else sample
    place = Target(regrid(table, drawn, GENERIC, folder / "table.yaml"), FACTS, "cpu", "host_mmap", 3)
    require_same_fallbacks(drawn, known, place)
    with (
        open_database(f"sqlite:///{folder}/verify.db") as database,
        open_run(database, place, known, tuning=True, margin=table.policy.margin) as run,
    ):
        run.weigh(table.policy.layers, table.policy.hidden_prepare or 0.0)
        strict(run)
        workers = [cast(Worker, worker)]
        Tuner(run, Crew(workers), workers[0], Silent(), Deadline(seconds), None, again=False).sweep()
        return findings(run, drawn), run


def outcomes(found: Sequence[Finding]) -> set[tuple[str, str, str]]:
    return {(each.outcome.value, each.place.answer, each.after) for each in found}


def test_a_table_that_holds(tmp_path: Path) -> None:
    table = made(tmp_path, ScriptedWorker(times=GAIN), cells=4)
    worker = ScriptedWorker(times=GAIN)
    found, run = verified(tmp_path, table, worker)
    assert outcomes(found) == {("same", "fast", "fast")}
    assert len(found) == 4
    assert {(each.speedup, each.speedup_low, each.place.speedup_low) for each in found} == {(2.0, 2.0, 2.0)}
    assert {each.checks for each in found} == {each.place.checks for each in found} != {None}
    # it proved again, in a study and under a margin of its own
    assert {route for route, _ in worker.proved} == {"fast", "torch-sdpa"}
    assert (run.study.space_name, run.study.margin, run.study.multiplicity) == ("verify", 0.05, 4)


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (GAIN, LOSS, ("changed", "fast", ".")),
        (LOSS, GAIN, ("changed", ".", "fast")),
        (LOSS, LOSS, ("same", ".", ".")),
        (GAIN, None, ("undecided", "fast", ".")),
        (LOSS, None, ("undecided", ".", ".")),
    ],
)
def test_a_letter_changes_only_where_the_evidence_contradicts_it(
    before: dict[str, float], after: dict[str, float] | None, wanted: tuple[str, str, str], tmp_path: Path
) -> None:
    # a table that speaks of its fallback only is measured against what its engine can deploy
    known = routes("torch-splitkv") if wanted[1] == "." else FAST

    def renamed(times: dict[str, float]) -> dict[str, float]:
        return {name: times["fast" if name == "torch-splitkv" else name] for name in known}

    table = made(tmp_path, ScriptedWorker(times=renamed(before)), known)
    if wanted[1] == ".":
        assert set(route_names(table, GENERIC.deployable("cpu"))) == set(known)
    worker = Wavering() if after is None else ScriptedWorker(times=renamed(after))
    if after is None and wanted[1] == ".":

        class WaveringSplit(Wavering):
            def _round(self, index: int, live: tuple[str, ...]) -> Round:
                one = super()._round(index, live)
                gain = renamed(GAIN if index % 2 else LOSS)
                return replace(one, run_us=gain, host_us=gain)

        worker = WaveringSplit()
    found, _ = verified(tmp_path, table, worker, known)
    name = "torch-splitkv" if wanted[2] == "fast" and wanted[1] == "." else wanted[2]
    assert outcomes(found) == {(wanted[0], wanted[1], name)}


def test_a_drop_must_be_as_sure_as_a_claim(tmp_path: Path) -> None:
    table = made(tmp_path, ScriptedWorker(times=GAIN), cells=4)
    found, run = verified(tmp_path, table, ScriptedWorker(times=LOSS))
    assert {each.outcome for each in found} == {Outcome.CHANGED}
    # N is 4
    assert (run.test.drop_at, run.judge.test.drop_at) == (80, 80)
    assert e_value(8, 8) < 80 <= e_value(9, 9)
    assert {each.detail for each in found} == {"fast: 0 of 9 above the margin"}


def test_a_route_that_became_unsafe(tmp_path: Path) -> None:
    table = made(tmp_path, ScriptedWorker(times=GAIN))
    worker = ScriptedWorker(times=GAIN, checks={("fast", "poisoned_output"): failed()})
    found, _ = verified(tmp_path, table, worker)
    assert outcomes(found) == {("unsafe", "fast", "!")}
    assert all("fast: wrong_output" in each.detail for each in found)
    assert all("autotune prove fast --column" in each.repro[0] for each in found)
    assert all("--seed" in each.repro[0] for each in found)


def test_a_fallback_that_became_unsafe(tmp_path: Path) -> None:
    table = made(tmp_path, ScriptedWorker(times=GAIN))
    worker = ScriptedWorker(times=GAIN, checks={("torch-sdpa", "reference"): failed(FailureKind.HANG)})
    found, _ = verified(tmp_path, table, worker)
    assert outcomes(found) == {("unsafe", "fast", "#")}


def test_a_candidate_of_a_fallback_letter_that_became_unsafe(tmp_path: Path) -> None:
    known = routes("torch-splitkv")
    table = made(tmp_path, ScriptedWorker(times={"torch-splitkv": 20.0}), known)
    worker = ScriptedWorker(checks={("torch-splitkv", "repeats"): failed(FailureKind.NONDETERMINISTIC)})
    assert outcomes(verified(tmp_path, table, worker, known)[0]) == {("unsafe", ".", "!")}


def test_an_accusation_that_repeats_and_one_that_does_not(tmp_path: Path) -> None:
    accused = ScriptedWorker(times=GAIN, checks={("fast", "reference"): failed()})
    table = made(tmp_path, accused)
    assert "fast" not in table.families
    assert set(route_names(table, ())) == {"torch-sdpa", "fast"}
    (tmp_path / "again").mkdir()
    assert outcomes(verified(tmp_path / "again", table, accused)[0]) == {("same", "!", "!")}
    found, _ = verified(tmp_path, table, ScriptedWorker(times=GAIN))
    assert outcomes(found) == {("changed", "!", "fast")}


def test_what_is_not_finished_is_open(tmp_path: Path) -> None:
    table = made(tmp_path, ScriptedWorker(times=GAIN))
    (tmp_path / "late").mkdir()
    found, _ = verified(tmp_path / "late", table, ScriptedWorker(times=GAIN), seconds=0.0)
    assert outcomes(found) == {("open", "fast", "?")}
    worker = ScriptedWorker(times=GAIN, checks={("fast", "reference"): unproven})
    found, _ = verified(tmp_path, table, worker)
    assert outcomes(found) == {("open", "fast", "?")}
    assert all("out_of_memory" in each.detail for each in found)


def test_another_route_takes_over_only_where_it_beats_the_first(tmp_path: Path) -> None:
    both = routes("fast", "other")
    table = made(tmp_path, ScriptedWorker(times={**GAIN, "other": 20.0}), both)
    (tmp_path / "equal").mkdir()
    equal = ScriptedWorker(times={**GAIN, "other": 5.0})
    assert outcomes(verified(tmp_path / "equal", table, equal, both)[0]) == {("same", "fast", "fast")}
    (tmp_path / "first").mkdir()
    # by its name alone "aaa" would come before "fast"
    named = routes("fast", "aaa")
    tie = ScriptedWorker(times={**GAIN, "aaa": 5.0})
    assert outcomes(verified(tmp_path / "first", table, tie, named)[0]) == {("same", "fast", "fast")}
    better = ScriptedWorker(times={**GAIN, "other": 2.0})
    assert outcomes(verified(tmp_path, table, better, both)[0]) == {("changed", "fast", "other")}


def test_the_table_s_own_objective_decides(tmp_path: Path) -> None:
    table = made(tmp_path, ScriptedWorker(times=GAIN))
    policy = table.policy._replace(objective="step", layers=2, hidden_prepare=0.5)

    class Preparing(ScriptedWorker):
        prepare_us = 30.0

        def _round(self, index: int, live: tuple[str, ...]) -> Round:
            one = super()._round(index, live)
            return replace(
                one, prepare_us={name: self.prepare_us if name == "fast" else 1.0 for name in live}
            )

    # 2 x 10 + 0.5 against 2 x 5 + 15; with nothing of less hidden, 2 x 5 + 5 would win
    found, run = verified(tmp_path, replace(table, policy=policy), Preparing(times=GAIN))
    assert outcomes(found) == {("changed", "fast", ".")}
    assert run.judge.objectives.layers(run.cells[0].cell.column) == 2
    assert run.judge.objectives.hidden == 0.5
    (tmp_path / "cheap").mkdir()
    cheap = Preparing(times=GAIN)
    cheap.prepare_us = 10.0
    found, _ = verified(tmp_path / "cheap", replace(table, policy=policy), cheap)
    assert outcomes(found) == {("same", "fast", "fast")}


def test_layers_come_from_the_models_where_the_table_has_none(tmp_path: Path) -> None:
    table = samples.sample()
    step = replace(table, policy=table.policy._replace(objective="step"))
    with pytest.raises(TableError, match=r"policy.objective: step counts the layers of 'qwen @ attn_tp 4'"):
        regrid(step, answered(step), GENERIC, tmp_path / "table.yaml")
    known = replace(
        step, entries=tuple(replace(e, models=("llama-3.1-70b @ attn_tp 8",)) for e in step.entries)
    )
    grid = regrid(known, answered(known), GENERIC, tmp_path / "table.yaml")
    assert {layers for entry in grid.entries for layers in entry.layers.values()} == {80}
    odd = replace(table, policy=table.policy._replace(objective="joules"))
    with pytest.raises(TableError, match="'joules' is not one of graph, step"):
        regrid(odd, answered(odd), GENERIC, tmp_path / "table.yaml")


def test_the_same_cells_come_out_of_the_table(tmp_path: Path) -> None:
    table = made(tmp_path, ScriptedWorker(times=GAIN), cells=4)
    cells = {item.cell for item in target().grid.cells}
    assert {place.cell for place in answered(table)} == cells
    assert {item.cell for item in regrid(table, answered(table), GENERIC, tmp_path / "t").cells} == cells
    one = answered(table)[1:2]
    (only,) = regrid(table, one, GENERIC, tmp_path / "t").cells
    assert only.cell == one[0].cell
    assert only.models == ("llama-3.1-70b @ attn_tp 8",)


def test_an_interval_is_the_batch_inside_it() -> None:
    places = [place for place in answered(samples.sample()) if place.cell.column.interval]
    assert [(p.cell.column.interval, p.cell.kv_high, p.letter, p.beside) for p in places] == [
        ((2, 4), 1024, "s", ("torch-splitkv",) * 2),
        ((4, 8), 1024, "!", ("torch-splitkv",) * 2),
        ((2, 4), 4096, "s", ("torch-splitkv",) * 2),
        ((4, 8), 4096, "s", ("torch-splitkv",) * 2),
    ]
    table = replace(samples.sample(), policy=samples.POLICY._replace(objective="graph"))
    grid = regrid(table, places, GENERIC, Path("table.yaml"))
    assert {item.cell for item in grid.cells} == {place.cell for place in places}
    assert {entry.intervals for entry in grid.entries} == {((2, 4),), ((4, 8),)}


def test_letters_without_evidence_are_not_asked() -> None:
    cells = [
        samples.decided(1, (4, 4096), samples.FASTER),
        samples.decided(2, (4, 4096), Decision(None, Reason.UNPROVEN)),
        samples.decided(4, (4, 4096), Decision(None, Reason.TOO_LARGE)),
        samples.decided(8, (4, 4096), Decision(None, Reason.NO_SAFE_ROUTE)),
    ]
    places = answered(samples.table_of(cells))
    assert [(place.cell.column.batch_size, place.letter) for place in places] == [(1, "s"), (8, "#")]


def test_a_sample_takes_every_letter_alike() -> None:
    cells = [samples.decided(size, (4, 4096), samples.FASTER) for size in range(1, 91)]
    cells += [samples.decided(size, (4, 4096), samples.SLOWER) for size in range(91, 97)]
    cells += [samples.decided(97, (4, 4096), samples.UNSAFE)]
    places = answered(samples.table_of(cells))

    def letters(count: int, seed: int = 0) -> list[str]:
        return sorted(place.letter for place in draw(places, count, seed))

    assert letters(9) == sorted("!....ssss")
    assert letters(1) == sorted("!.s")  # one of each, whatever is asked
    assert letters(15) == sorted("!" + 6 * "." + 8 * "s")  # what a letter lacks, the others give
    assert len(draw(places, 97, 0)) == len(draw(places, 10_000, 0)) == 97
    assert draw(places, 9, 5) == draw(places, 9, 5) != draw(places, 9, 6)
    order = [places.index(place) for place in draw(places, 20, 1)]
    assert order == sorted(order)


def test_another_fallback_is_not_compared(tmp_path: Path) -> None:
    table = made(tmp_path, ScriptedWorker(times=GAIN))
    drawn = answered(table)
    place = Target(regrid(table, drawn, GENERIC, tmp_path / "t"), FACTS, "cpu", "host_mmap", 3)
    without = {name: route for name, route in FAST.items() if name != "torch-sdpa"}
    with pytest.raises(IncomparableError, match="the table's fallback is torch-sdpa, this version's is none"):
        require_same_fallbacks(drawn, without, place)
