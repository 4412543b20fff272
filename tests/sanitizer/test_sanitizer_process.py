"""Bounded output, bounded time, nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from autotune.sanitizer.process import Captured, capture


def run(code: str, timeout_s: float = 60.0, most_bytes: int = 1000) -> Captured:
    return capture([sys.executable, "-c", code], os.environ, timeout_s, most_bytes)


def gone(pid: int, timeout_s: float = 30.0) -> bool:
    """Whether a process ends, or is only waiting to be buried."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_both_streams_and_the_status() -> None:
    got = run("import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)")
    assert got == Captured("out\nerr\n", 3)
    assert run("import os; os.kill(os.getpid(), 9)").status == -signal.SIGKILL
    assert run("import os; os.write(1, b'\\xff\\x00')").output == "\ufffd\x00"


def test_too_late() -> None:
    got = run("print('begun', flush=True); import time; time.sleep(600)", timeout_s=2.0)
    assert (got.late, got.flooded, got.status) == (True, False, -signal.SIGKILL)


def test_too_late_with_its_output_closed() -> None:
    got = run("import os, time; os.close(1); os.close(2); time.sleep(600)", timeout_s=2.0)
    assert (got.late, got.output) == (True, "")


def test_too_much() -> None:
    got = run("import os\nwhile True: os.write(1, b'x' * 65536)")
    assert (got.flooded, got.late) == (True, False)
    assert got.output == "x" * 1000


def test_a_process_that_it_leaves_is_killed_and_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    sleeper = "import time; time.sleep(600)"
    code = f"""
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {sleeper!r}])
pathlib.Path({str(pid)!r}).write_text(str(child.pid))
"""
    got = run(code)
    assert (got.status, got.late) == (0, False)
    assert gone(int(pid.read_text()))


def test_an_interrupt_kills_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )

    def interrupt() -> None:
        end = time.monotonic() + 60.0
        while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)

    class StopError(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise StopError

    before = signal.signal(signal.SIGINT, stop)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(StopError):
            run(code)
    finally:
        signal.signal(signal.SIGINT, before)
    assert gone(int(pid.read_text()))


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(OSError, match="nowhere"):
        capture(["/nowhere/at-all"], os.environ, 1.0)
