"""Runs a program whose output and time are bounded, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_BYTES = 4 << 20
_CHUNK = 1 << 16
# A descendant may hold the pipe open after the program's end: what it then says is not waited for.
_SLICE_S = 0.2


@dataclass(frozen=True, slots=True)
class Captured:
    """How a program ended.

    Attributes:
        output: stdout and stderr, at most ``MOST_BYTES`` of it from the start.
        status: exit status, minus the signal's number if a signal ended it.
        late: it did not end in time and was killed.
        flooded: it printed more than the limit and was killed.
    """

    output: str
    status: int
    late: bool = False
    flooded: bool = False


def capture(
    command: Sequence[str], env: Mapping[str, str], timeout_s: float, most_bytes: int = MOST_BYTES
) -> Captured:
    """Run ``command`` to its end in a process group of its own; whatever ends the call kills the group.

    Raises:
        OSError: it cannot be started.
    """
    end = time.monotonic() + timeout_s
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    read = bytearray()
    late = flooded = False
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not (late := time.monotonic() >= end):
                ended = process.poll() is not None
                if selector.select(0.0 if ended else min(_SLICE_S, max(0.0, end - time.monotonic()))):
                    part = os.read(process.stdout.fileno(), _CHUNK)
                    if not part:
                        break
                    read += part
                    if flooded := len(read) > most_bytes:
                        break
                elif ended:
                    break
            if not (late or flooded):
                late = _still_runs(process, end)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()
    return Captured(read[:most_bytes].decode("utf-8", "replace"), process.returncode, late, flooded)


def _still_runs(process: subprocess.Popen[bytes], end: float) -> bool:
    """Whether a program that has closed its output is not done by ``end``."""
    try:
        process.wait(timeout=max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return True
    return False
