"""Reports that make no sense, and deaths that may be an earlier cell's; the worker follows a script."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.verdict import FailureKind, Status
from autotune.tuner.racer import read_rounds
from autotune.worker.base import Failed, Outcome, ProtocolError
from tests.tuner.scripted import ScriptedWorker, opened, routes, sweep

FAST = routes("fast")


@dataclass
class DiesAfterOthers(ScriptedWorker):
    """Dies once in the step of ``fast``, in a child that timed another cell's routes before."""

    died: bool = False

    def _end(self) -> Outcome | None:
        if self.died:
            return None
        self.died = True
        return Failed(FailureKind.CRASH, "SIGABRT", "fast: timing", steps=5, after=("other",))


def test_a_death_that_may_be_an_earlier_cells_is_raced_again(tmp_path: Path) -> None:
    worker = DiesAfterOthers(times={"fast": 5.0})
    with opened(tmp_path, FAST) as run:
        assert sweep(run, worker, trials=1).now == 1
        assert worker.died
        cell = run.cells[0].cell
        assert run.book.verdict(FAST["fast"], cell.column, "cpu", cell).status is Status.SAFE
        assert run.repository.trials(run.study)[cell.id].lost == 1
        rounds = [each["index"] for each in run.repository.rounds(run.study, cell)]
        assert rounds == list(range(len(rounds)))
        assert len(worker.timed) == 2


@dataclass
class Garbles(ScriptedWorker):
    """Reports what ``spoil`` makes of a report, as a child with a damaged memory might."""

    spoil: Callable[[dict[str, Any]], Any] = lambda payload: payload

    def run(self, job: Any, *, on_event: Callable[[Any], Any] | None = None, **more: Any) -> Outcome:
        if on_event is None:
            return super().run(job, **more)
        tell = on_event
        return super().run(job, on_event=lambda payload: tell(self.spoil(payload)), **more)


def _set(payload: dict[str, Any], **fields: Any) -> dict[str, Any]:
    payload["rounds"][-1].update(fields)
    return payload


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "none": lambda _: None,
    "empty": lambda _: {"rounds": []},
    "no-rounds": lambda _: {},
    "index": lambda payload: _set(payload, index=99),
    "route": lambda payload: _set(payload, order=["torch-sdpa"]),
    "nan": lambda payload: _set(payload, run_us={"torch-sdpa": float("nan"), "fast": 1.0}),
    "negative": lambda payload: _set(payload, prepare_us={"torch-sdpa": -1.0, "fast": 1.0}),
    "text": lambda payload: _set(payload, run_us={"torch-sdpa": "1", "fast": 1.0}),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_report_that_makes_no_sense_is_not_stored(
    spoil: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    with opened(tmp_path, FAST) as run:
        progress = sweep(run, Garbles(spoil=spoil), trials=1)
        assert progress.now == 0
        cell = run.cells[0].cell
        assert list(run.repository.rounds(run.study, cell)) == []
        assert run.repository.trials(run.study)[cell.id].lost == 1
        for route in FAST.values():
            assert run.book.verdict(route, cell.column, "cpu", cell).status is Status.SAFE
        assert "report of rounds" in run.book.trouble(FAST.values(), cell)
        assert sweep(run, ScriptedWorker(times={"fast": 5.0}), trials=1).now == 1


def test_rounds_go_on_where_the_stored_ones_end() -> None:
    one = {
        "index": 4,
        "order": ["a"],
        "run_us": {"a": 1.0},
        "host_us": {"a": 1.0},
        "prepare_us": {"a": 0.0},
        "calls": {"a": 1},
    }
    assert [each.index for each in read_rounds({"rounds": [one, {**one, "index": 5}]}, 4)] == [4, 5]
    with pytest.raises(ProtocolError, match="does not go on with round 3"):
        read_rounds({"rounds": [one]}, 3)


@pytest.mark.parametrize("part", ["run_us", "host_us", "prepare_us"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 10**400, "1.0", None, 1e13])
def test_times_that_no_call_takes_are_not_stored(part: str, value: object) -> None:
    one = {"index": 0, "order": ["a"], **{name: {"a": 1.0} for name in ("run_us", "host_us", "prepare_us")}}
    one |= {"calls": {"a": 1}, part: {"a": value}}
    with pytest.raises(ProtocolError):
        read_rounds({"rounds": [one]}, 0)


@pytest.mark.parametrize(("part", "sound"), [("run_us", False), ("host_us", False), ("prepare_us", True)])
@pytest.mark.parametrize("value", [0.0, 5e-324])
def test_a_call_takes_some_time_and_a_preparation_may_take_none(part: str, sound: bool, value: float) -> None:
    one = {"index": 0, "order": ["a"], **{name: {"a": 1.0} for name in ("run_us", "host_us", "prepare_us")}}
    one |= {"calls": {"a": 1}, part: {"a": value}}
    if sound:
        assert len(read_rounds({"rounds": [one]}, 0)) == 1
    else:
        with pytest.raises(ProtocolError):
            read_rounds({"rounds": [one]}, 0)
