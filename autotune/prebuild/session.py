"""The processes of a build: what was started in a session of its own ends as a whole.

A build is a tree: the process that imports FlashInfer, its ninja, and compilers that ninja puts into process
groups of their own, which a signal to one group does not reach. All of them are in one session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# On SIGTERM ninja ends its compilers and removes what they had half written: a moment, on a quick disk.
PATIENCE_S = 5.0
_LOOK_EVERY_S = 0.02
_PR_SET_PDEATHSIG = 1


def members(session: int) -> list[int]:
    """Pids of the live processes of a session, in order; read from Linux's ``/proc``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            # "pid (name) state ppid pgrp session ...": a name may hold blanks and brackets
            state, _, _, leads = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(leads) == session and state not in "ZX":
                found.append(int(entry.name))
    return sorted(found)


def end(session: int, patience_s: float = PATIENCE_S) -> None:
    """End every process of the session but this one: asked first, killed if it does not go.

    The leader is asked alone, and the others when it is gone: it may have its own way to end them
    (:func:`end_with_parent`), and a second SIGTERM would stop ninja from cleaning up after the first.

    Args:
        session: the pid of the process that was started with ``start_new_session``.
        patience_s: seconds from a request to the kill; three times as long for the leader, which waits too.
    """
    if session != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(session, signal.SIGTERM)
        until = time.monotonic() + 3 * patience_s
        while session in members(session) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
    if not _gone(session, signal.SIGTERM, patience_s):
        _gone(session, signal.SIGKILL, patience_s)


def _gone(session: int, number: signal.Signals, wait_s: float) -> bool:
    """Whether the others of the session, sent this signal once each, were gone in time."""
    until = time.monotonic() + wait_s
    told: set[int] = set()
    while left := set(members(session)) - {os.getpid()}:
        for pid in left - told:  # one that is told to end may have started another one
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        told |= left
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a compiler to its end, its output captured; an interruption ends it with all that it started.

    Args:
        text: for its standard input.

    Raises:
        OSError: it cannot be started.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(text)
        except BaseException:
            end(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_with_parent(parent: int) -> None:
    """From now on this process ends on SIGTERM with its whole session, and is sent one when its parent dies.

    The parent may be killed in a way that leaves it no time to end anything. (Linux only: elsewhere its death
    goes unnoticed.) The session's leader alone may call it; in another process nothing is done.

    Args:
        parent: its pid. If it is dead already this process ends at once.
    """
    if os.getsid(0) != os.getpid():
        return
    signal.signal(signal.SIGTERM, _end)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            _end(signal.SIGTERM, None)


def ending() -> bool:
    """Whether this process is ending its session: a thread that waited for a compiler starts no other one."""
    return _State.ending


class _State:
    ending = False


def _end(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    _State.ending = True
    end(os.getpid())
    os._exit(128 + number)
