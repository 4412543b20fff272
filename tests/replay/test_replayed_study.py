"""A study made by a scripted worker, and the same study from its own database: equal, faults and all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path

import pytest

from autotune.domain.decision import Reason
from autotune.domain.verdict import FailureKind
from autotune.replay.errors import RecordingError
from autotune.replay.packing import pack
from autotune.replay.read import read_recording
from autotune.replay.recording import Recording
from autotune.replay.replay import Replayed, replay
from autotune.replay.routes import recorded_routes
from autotune.replay.study_file import Choose
from autotune.replay.thinned_file import write_thinned
from autotune.routes.base import Route
from autotune.tuner.publish import decide_all
from tests.tuner.scripted import ScriptedWorker, failed, opened, routes, sweep, target, unproven
from tests.tuner.test_recheck import FAST, SIX_CELLS, SecondWorker

ROUTES = routes("torch-splitkv", "slow")


def first() -> Choose:
    return lambda offers: offers[0][0]


def record(folder: Path, worker: ScriptedWorker, *, trials: int | None = None) -> Recording:
    """The study that the script makes, from its database."""
    with opened(folder, ROUTES) as run:
        sweep(run, worker, trials=trials)
    return read_recording(folder / "sweep.db", first())


def again(
    recording: Recording, *, budget_s: float | None = None, known: dict[str, Route] = ROUTES
) -> Replayed:
    here = replace(target(), seed=recording.study.seed)
    return replay(recording, here, recorded_routes(recording, known), budget_s=budget_s)


def decisions(found: Replayed) -> dict[str, object]:
    answers = found.answers["generic"]
    return {each.item.cell.id: each.decision for each in answers if each.final}


SCRIPTS = {
    "faster": ScriptedWorker(times={"torch-splitkv": 5.0, "slow": 20.0}),
    "wrong": ScriptedWorker({("torch-splitkv", "scales"): failed()}),
    # the second run with padding must not be asked for: the row has its last word already
    "fault": ScriptedWorker({("torch-splitkv", "nan_pool"): failed(FailureKind.ILLEGAL_ACCESS)}),
    "unsafe fallback": ScriptedWorker({("torch-sdpa", "reference"): failed()}),
    "death while timing": ScriptedWorker(times={"slow": 5.0}, deaths={"torch-splitkv"}),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    """The recording of a script, made once."""

    @cache
    def made(name: str) -> Recording:
        return record(tmp_path_factory.mktemp("recorded"), SCRIPTS[name])

    return made


@pytest.mark.parametrize("name", SCRIPTS)
def test_decisions_are_the_stored_ones_and_a_thinned_file_replays_alike(
    name: str, recorded: Callable[[str], Recording], tmp_path: Path
) -> None:
    recording = recorded(name)
    assert len(recording.decisions) == len(recording.cells) > 0
    found = again(recording)
    assert decisions(found) == recording.decisions
    assert not found.unrecorded
    write_thinned(recording, tmp_path / "thin.db")
    thinned = read_recording(tmp_path / "thin.db", first())
    assert thinned.study == recording.study
    assert thinned.timings == recording.timings
    assert json.dumps(again(thinned).to_dict()) == json.dumps(found.to_dict())


def test_recorded_time_passes_and_ends_at_the_budget(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("faster")
    # a scripted run takes no time to speak of: say how long everything took
    slow = replace(
        recording,
        checks=tuple(replace(check, seconds=1.0) for check in recording.checks),
        timings={
            cell: replace(timing, chunks=tuple((size, 10.0) for size, _ in timing.chunks))
            for cell, timing in recording.timings.items()
        },
    )
    whole = again(slow)
    assert whole.seconds == pytest.approx(slow.seconds)
    assert sum(whole.costs.values()) == pytest.approx(slow.seconds)
    short = again(slow, budget_s=slow.seconds / 2)
    assert short.out_of_budget
    # what is begun is finished: a check, or a chunk of rounds
    assert slow.seconds / 2 <= short.seconds <= slow.seconds / 2 + 10.0
    assert 0 < len(decisions(short)) < len(decisions(whole))
    assert not short.unrecorded
    assert [point for point in whole.curve if point[0] <= short.seconds] == list(short.curve)


def test_what_was_not_recorded_stays_unproven_and_is_counted(tmp_path: Path) -> None:
    recording = record(tmp_path, SCRIPTS["faster"], trials=1)
    found = again(recording)
    assert decisions(found) == recording.decisions
    others = [each for each in found.answers["generic"] if not each.final]
    assert {each.item.cell.id for each in others} == found.unrecorded
    assert len(others) == 3
    assert {each.decision.reason for each in others} == {Reason.UNPROVEN}
    assert all("not recorded" in each.decision.detail for each in others)
    assert found.missing_checks > 0
    assert found.to_dict()["not_recorded"]["cells"] == 3


def test_rounds_that_end_too_early_are_not_recorded(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("faster")
    cell = recording.cells[0].cell.id
    timings = {name: timing for name, timing in recording.timings.items() if name != cell}
    found = again(replace(recording, timings=timings))
    assert found.unrecorded == {cell}
    assert found.missing_timings == 1
    (left,) = [each for each in found.answers["generic"] if not each.final]
    assert "not recorded: rounds from 0 on" in left.decision.detail


def test_a_cell_that_stays_open_counts_by_the_letter_that_it_has(
    recorded: Callable[[str], Recording],
) -> None:
    recording = recorded("faster")
    column = recording.cells[0].cell.column
    checks = tuple(it for it in recording.checks if it.route != "slow" or it.column != column)
    found, whole = again(replace(recording, checks=checks)), again(recording)
    left = [each for each in found.answers["generic"] if not each.final]
    assert {each.item.cell.column for each in left} == {column}
    assert {each.decision.route for each in left} == {"torch-splitkv"}
    # four cells, each counted when its rounds were there; the fallback takes twice as long
    assert [gain for _, gain in found.curve] == pytest.approx([i * log(2.0) for i in (1, 2, 3, 4)])
    assert found.gain == pytest.approx(whole.gain)


def test_a_recorded_check_that_says_nothing_says_nothing_again(tmp_path: Path) -> None:
    recording = record(tmp_path, ScriptedWorker({("torch-splitkv", "scales"): unproven}))
    assert not recording.decisions
    found = again(recording)
    assert not decisions(found)
    assert not found.missing_checks
    assert all("no memory" in each.decision.detail for each in found.answers["generic"])


def test_rows_of_another_version_are_not_recorded(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("faster")
    older = tuple(
        replace(check, route_version=0) if check.route == "torch-splitkv" else check
        for check in recording.checks
    )
    found = again(replace(recording, checks=older))
    assert not decisions(found)
    assert len(found.unrecorded) == len(recording.cells)


def test_a_route_that_is_not_installed_here_is_told(recorded: Callable[[str], Recording]) -> None:
    recording = recorded("faster")
    with pytest.raises(RecordingError, match="recorded with the route slow, which is not installed here"):
        again(recording, known=routes("torch-splitkv"))


def test_the_database_is_not_touched(tmp_path: Path) -> None:
    with opened(tmp_path, ROUTES):
        pass
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"sweep.db", "sweep.db.lock"}
    assert read_recording(tmp_path / "sweep.db", first()).cells
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_database_in_use_is_read_with_its_log(tmp_path: Path) -> None:
    with opened(tmp_path, ROUTES) as run:
        sweep(run, ScriptedWorker(times={"torch-splitkv": 5.0, "slow": 20.0}))
        assert (tmp_path / "sweep.db-wal").stat().st_size > 0
        recording = read_recording(tmp_path / "sweep.db", first())
        assert recording.decisions == run.repository.decisions(run.study)
    assert len(recording.decisions) == 4


def test_second_processes_are_taken_as_recorded(tmp_path: Path) -> None:
    """Six cells whose ratios fall by 1 % in a second process, a near claim among them that it refuses."""
    near = SIX_CELLS.grid.cells[2].cell.id

    def speed(cell: str, later: bool, index: int) -> float:
        if cell == near:
            return (1.10 if index % 2 else 1.02) if later else 1.07
        return 1.98 if later else 2.0

    (tmp_path / "study").mkdir()
    with opened(tmp_path / "study", FAST, SIX_CELLS) as run:
        sweep(run, SecondWorker(speed=speed))
        tau, margin = run.judge.tau(), run.judge.test_of().margin
        answers = {each.cell.id: each.decision for each in decide_all(run)}
    assert tau is not None and margin == 0.05
    assert answers[near].reason is Reason.UNDECIDED and "did not agree" in answers[near].detail
    recording = read_recording(tmp_path / "study" / "sweep.db", first())
    assert set(recording.again) == set(answers)
    here = replace(SIX_CELLS, seed=recording.study.seed)
    found = replay(recording, here, recorded_routes(recording, FAST))
    assert (found.tau, found.margin) == (tau, margin)
    assert decisions(found) == answers
    # the recording's tau is there from the first cell on, whatever else is timed
    one = replay(recording, here, recorded_routes(recording, FAST), trials=1)
    assert (one.tau, len(decisions(one))) == (tau, 1)
    write_thinned(recording, tmp_path / "thin.db")
    thinned = read_recording(tmp_path / "thin.db", first())
    assert thinned.again == recording.again
    assert replay(thinned, here, recorded_routes(thinned, FAST)).to_dict() == found.to_dict()
    # a second process that was not recorded to its end is not asked for: there is no child to ask
    torn = tuple(replace(it, packed=pack(it.rounds[:2])) for it in recording.again[near])
    cut = {**recording.again, near: torn}
    short = replay(replace(recording, again=cut), here, recorded_routes(recording, FAST))
    (waiting,) = (each.decision for each in short.answers["generic"] if each.item.cell.id == near)
    assert waiting.reason is Reason.UNPROVEN and "a second process must agree" in waiting.detail
    assert {cell: it for cell, it in decisions(short).items() if cell != near} == {
        cell: it for cell, it in answers.items() if cell != near
    }
