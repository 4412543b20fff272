"""Which routes were captured when a process died: a small file, on disk before the route is called.

One file per engine process and hook, ``suspects-<engine>-<pid>-<process start>-<time>.json`` in the state
folder (a process number is used again, in a container at every start). It is written whole and flushed to the
disk (fsync, then rename, then fsync of the folder) *before* a call that goes to a route for the first time.
An orderly exit removes it. So a file whose process is gone names what that process had captured or called
when it died: not a proof, but where to look, and what ``autotune quarantine`` would withdraw.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from autotune.engines.log import say, told

PREFIX = "suspects-"
# CUDA errors after which a context is dead; the text is torch's or the driver's.
DEADLY = re.compile(
    r"CUDA error|CUDA_ERROR|illegal memory access|misaligned address|unspecified launch failure"
    r"|device-side assert|illegal instruction",
    re.IGNORECASE,
)
# A table names a few hundred cells; a file past this is no file of ours.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Suspect:
    """What a process that ended badly had called.

    Attributes:
        death: the CUDA error that it saw, or empty where it ended without a word.
        routes: ``(route, cell)`` in the order in which they were first called.
        path: the file that says so.
    """

    engine: str
    pid: int
    started: str
    table: str
    digest: str
    death: str
    routes: tuple[tuple[str, str], ...]
    path: Path

    def __str__(self) -> str:
        seen = "; ".join(f"{route} at {cell}" for route, cell in self.routes) or "no route"
        ended = f"died of {self.death}" if self.death else "ended without an orderly exit"
        return f"{self.engine} process {self.pid} (started {self.started}) {ended}; it had called {seen}"


class Captured:
    """The file of this process. No method raises: without a file, serving goes on."""

    def __init__(self, folder: Path, engine: str, *, table: str, digest: str) -> None:
        self._pid = os.getpid()
        born = _born(self._pid)
        # the time tells two hooks of one process apart, and processes of two boots
        self._path = folder / f"{PREFIX}{engine}-{self._pid}-{born or 0}-{time.time_ns()}.json"
        self._known: set[tuple[str, str]] = set()
        self._data: dict[str, Any] = {
            "engine": engine,
            "pid": self._pid,
            "born": born,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "table": table,
            "digest": digest,
            "death": "",
            "routes": [],
        }
        atexit.register(self.close)

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._path

    def add(self, route: str, cell: str) -> None:
        """A route is about to be called for the first time in ``cell``. On disk when this returns."""
        if (route, cell) not in self._known:
            self._known.add((route, cell))
            self._data["routes"].append([route, cell])
            self._write()

    def saw(self, error: BaseException) -> bool:
        """An exception came out of a call; whether it is one after which the context is dead."""
        text = told(error)
        if not DEADLY.search(text):
            return False
        if self._known and not self._data["death"]:
            self._data["death"] = text
            self._write()
        return True

    def close(self) -> None:
        """An orderly exit: the file goes, unless a CUDA error was seen. A forked child leaves it alone."""
        try:
            if os.getpid() == self._pid and not self._data["death"] and not _context_is_dead():
                self._path.unlink(missing_ok=True)
        except Exception:
            return

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(f".{os.getpid()}.partial")
            with partial.open("w", encoding="utf-8") as stream:
                json.dump(self._data, stream)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except Exception as error:
            if self._known:
                say(f"captured routes are not kept: {self._path}: {told(error)}")


def find_suspects(folder: Path) -> tuple[Suspect, ...]:
    """What processes that are gone left behind, oldest first. A file that is none of ours is passed over."""
    found: list[tuple[float, Suspect]] = []
    for path in sorted(folder.glob(f"{PREFIX}*.json")) if folder.is_dir() else ():
        try:
            seen = path.stat()
            if not stat.S_ISREG(seen.st_mode) or seen.st_size > _MOST_BYTES:
                continue
            data = json.loads(path.read_text("utf-8"))
            suspect = Suspect(
                engine=_text(data["engine"]),
                pid=int(data["pid"]),
                started=_text(data["started"]),
                table=_text(data["table"]),
                digest=_text(data["digest"]),
                death=_text(data["death"]),
                routes=tuple((_text(route), _text(cell)) for route, cell in data["routes"]),
                path=path,
            )
            alive = _born(suspect.pid)
            # a number is used again: the start time tells the process from its successor
            if suspect.death or alive is None or alive != data.get("born"):
                found.append((seen.st_mtime, suspect))
        except Exception:  # foreign contents: no list of them is complete, and an engine starts all the same
            continue
    return tuple(suspect for _, suspect in sorted(found, key=lambda pair: pair[0]))


def forget_suspects(found: Iterable[Suspect]) -> int:
    """Remove the files that :func:`find_suspects` found, whatever they say; how many went.

    Raises:
        OSError: one cannot be removed.
    """
    gone = 0
    for suspect in found:
        suspect.path.unlink(missing_ok=True)
        gone += 1
    return gone


def _text(value: object) -> str:
    """For a terminal: what a file says, in printable characters."""
    return "".join(each if each.isprintable() else "?" for each in str(value))


def _born(pid: int) -> str | None:
    """Start time of a running process in clock ticks, or None: field 22 of ``/proc/PID/stat``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        # state Z: a zombie holds its number and runs nothing
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return None


def _context_is_dead() -> bool:
    """Whether this process' CUDA context reports a sticky error. Asks nothing where CUDA was not used."""
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.current_stream().query()  # does not wait
    except Exception:
        return True
    return False
