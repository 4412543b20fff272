"""``benchmarks/ending.py``: a script that is stopped tells what it has, and one whose time is up ends."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.ending import Pulse, ending

ROOT = Path(__file__).resolve().parents[2]
# says that it is in the loop, then waits as a crew waits for its children
WAITING = """
import queue, sys
from benchmarks.ending import ending
found = []
with ending("waiting"):
    found.append("one row")
    print("begun", flush=True)
    queue.SimpleQueue().get()
print("told:", *found)
"""


def test_time_that_is_up_ends_a_wait(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending("loop", 0.0, grace_s=0.05):
        queue.SimpleQueue[None]().get()
    assert capsys.readouterr().err == "loop: its time is up; what was found until then:\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_body_may_be_given_another_time(capsys: pytest.CaptureFixture[str]) -> None:
    with ending("loop", 3600.0, grace_s=0.05) as end:
        end.allow(0.0)
        queue.SimpleQueue[None]().get()
    assert end.why == "its time is up"
    assert capsys.readouterr().err == "loop: its time is up; what was found until then:\n"


def test_time_that_is_up_while_a_signal_is_obeyed_kills_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ending("loop", 0.0, grace_s=0.2):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            time.sleep(0.4)  # children end
    assert capsys.readouterr().err == "loop: stopped by a signal; what was found until then:\n"


def test_a_body_that_ends_by_itself_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with ending("loop", 3600.0) as end:
        end.allow(7200.0)
    assert end.why == ""
    with pytest.raises(ValueError, match="its own"), ending("loop", 3600.0):
        raise ValueError("its own")
    assert capsys.readouterr().err == ""


def test_a_signal_loses_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60.0)
    assert (process.returncode, out) == (0, "told: one row\n")
    assert err == "waiting: stopped by a signal; what was found until then:\n"


def test_a_pulse_is_not_a_flood(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    pulse = Pulse("soak", start, every_s=20.0)
    times = (1.0, 19.9, 20.0, 21.0, 39.9, 40.0)
    assert [at for at in times if pulse.beat(start + at, f"at {at}")] == [20.0, 40.0]
    assert capsys.readouterr().err == "soak: 20 s: at 20.0\nsoak: 40 s: at 40.0\n"
