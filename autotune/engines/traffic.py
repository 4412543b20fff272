"""Counts of (batch size, q_len, KV bucket), for ``autotune run --traffic``.

The lines are those of :mod:`autotune.domain.traffic`. The file is written whole: on an orderly exit, on
SIGUSR2 where nobody else handles it, and once a minute while calls come in, since servers are often killed.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from autotune.domain.traffic import ShapeCount, bucket
from autotune.engines.log import say, told

WRITE_EVERY_S = 60.0
# A server has tens of captured sizes; past this, counting is a leak.
_MOST = 100_000


class Traffic:
    """Counters of this process. ``count`` is a dictionary addition; no method raises."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock, self._pid = path, clock, os.getpid()
        self._counts: dict[tuple[int, int, int | None], int] = {}
        self._due = clock() + WRITE_EVERY_S
        self._failed = False
        atexit.register(self.write)
        self._listen()

    def count(self, batch_size: int, q_len: int, max_kv_len: int | None) -> None:
        """One step of a model, or one call where steps cannot be told: what is compared are shares."""
        key = (batch_size, q_len, None if max_kv_len is None else bucket(max_kv_len))
        counts = self._counts
        if key in counts or len(counts) < _MOST:
            counts[key] = counts.get(key, 0) + 1
        if self._clock() >= self._due:
            self._due = self._clock() + WRITE_EVERY_S
            self.write()

    def write(self) -> None:
        """The whole file, atomically. A forked child writes nothing: the counts are its parent's."""
        if os.getpid() != self._pid or not self._counts:
            return
        try:
            counts = sorted(self._counts.items(), key=lambda item: (-item[1], str(item[0])))
            lines = [ShapeCount(*shape, count).line() for shape, count in counts]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(f"{self._path.name}.{self._pid}.partial")
            partial.write_text("\n".join(lines) + "\n", "utf-8")
            partial.replace(self._path)
        except Exception as error:
            if not self._failed:
                self._failed = True
                say(f"traffic is not written: {self._path}: {told(error)}")

    def _listen(self) -> None:
        """SIGUSR2 writes, where it would end the process otherwise; an engine's own handler stays."""
        try:
            if threading.current_thread() is threading.main_thread() and (
                signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
            ):
                signal.signal(signal.SIGUSR2, lambda number, frame: self.write())
        except (ValueError, OSError):
            return
