"""``autotune run --devices`` with real lanes on two cores: killed, interrupted, resumed."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from autotune.hardware.devices import cpus
from tests.console import Place, Result, Script, cli, script


def children(started: Script) -> list[int]:
    """Its processes that are tied to one core: the lanes' children."""
    found = []
    for pid in started.survivors():
        try:
            if len(os.sched_getaffinity(pid)) == 1:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


@pytest.mark.skipif(len(cpus()) < 2, reason="needs two cores")
def test_lanes_killed_interrupted_and_resumed_by_one(tested: Place, finished: tuple[Place, Result]) -> None:
    flags = [*tested.flags(), "--budget", "10m"]
    started = Script(["run", *flags, "--devices", "0,1"], tested.folder)
    seen: list[int] = []

    def proving() -> bool:
        seen[:] = children(started)
        return tested.count("proof") > 3 and len(seen) > 1

    started.until(proving)
    with contextlib.suppress(
        ProcessLookupError
    ):  # one that was just replaced is as gone as one that is killed
        os.kill(seen[0], signal.SIGKILL)
    before = tested.count("proof")
    started.until(lambda: tested.count("proof") > before + 3)
    started.send(signal.SIGTERM)
    interrupted = started.end()
    started.assert_nothing_left()
    assert interrupted.code == 130, interrupted.err
    assert "interrupted; what is stored stays" in interrupted.err.splitlines()[-1]
    assert tested.unended() == 0
    assert tested.count("decision") < 4

    resumed = script("run", *flags, "--devices", "1", "--json", folder=tested.folder)
    assert resumed.code == 0, resumed.err
    assert resumed.json["settled"] == 4
    assert resumed.json["devices_at_work"] == ["cpu:1"]
    assert tested.completed() == [(number, 1) for number in range(4)]
    assert tested.unended() == 0
    assert tested.verdicts() == finished[0].verdicts()


@pytest.mark.skipif(len(cpus()) < 2, reason="needs two cores")
def test_a_finished_study_goes_on_with_two(done: Place) -> None:
    result = cli("run", *done.flags(), "--devices", "all")
    assert result.code == 0, result.err
    assert "4 of 4 cells settled, 0 by this call" in result.out
    assert f"measured with {len(cpus())} devices of this host at work: cpu:0, cpu:1" in result.out


@pytest.mark.parametrize("text", ["7777", "0,0", "gpu0", ""])
def test_devices_that_are_not_there(text: str, place: Place) -> None:
    result = cli("run", *place.flags(), "--devices", text)
    assert result.code == 2
    assert result.line.startswith("autotune: --devices ")
    assert not place.file.exists()


def test_devices_of_another_machine(place: Place) -> None:
    result = cli("run", "--gpu", "h200", "--devices", "0", "--db", place.url, "--out", place.out)
    if result.code != 3:
        pytest.skip("this machine has an H200")
    assert "--gpu h200 asks for" in result.line
    assert not place.file.exists()
