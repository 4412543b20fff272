"""How a benchmark ends: by itself, when its time is up, or by a signal; what it has found is told anyway.

A device is lent for minutes: a command that is killed at its limit must not lose what it measured until then.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING

from autotune.cli.signals import Interrupted, interruptible

if TYPE_CHECKING:
    from collections.abc import Iterator

# Past ``--seconds`` nothing new begins, and what runs may come to its end; then it is cut off.
GRACE_S = 10.0


class End:
    """How long the body of :func:`ending` may go on, and what ended it.

    Attributes:
        why: it was cut off; "" where it ended by itself.
    """

    def __init__(self, grace_s: float) -> None:
        self.why = ""
        self._grace = grace_s
        self._late = threading.Event()
        self._timer: threading.Timer | None = None

    def allow(self, seconds: float) -> None:
        """The body has ``seconds`` from now, whatever it had before."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.stop()
        self._timer = threading.Timer(max(0.0, seconds + self._grace), self._cut)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """It has no limit any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # a signal on its way arrives while it is still caught

    def interrupted(self) -> None:
        """A signal ended it, its own or another."""
        self.why = "its time is up" if self._late.is_set() else "stopped by a signal"

    def _cut(self) -> None:
        # another signal has come first, and the body is on its way out: a second one would kill it
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            return
        self._late.set()
        # to the main thread by name: a wait for a child is interrupted only there
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


@contextlib.contextmanager
def ending(name: str, seconds: float | None = None, grace_s: float = GRACE_S) -> Iterator[End]:
    """Ctrl-C, SIGTERM and the end of its time leave the body where it stands, with a line on stderr.

    What follows the ``with`` block tells what there is; a second signal then ends the process at once. A body
    that waits inside a kernel launch cannot be left: no signal reaches Python there.

    Args:
        name: of the script, in the line.
        seconds: the body's time, until it is given another; ``grace_s`` later it is cut off. None: it has no
            limit.
    """
    end = End(grace_s)
    try:
        with interruptible():
            try:
                if seconds is not None:
                    end.allow(seconds)
                yield end
            finally:
                end.stop()
    except Interrupted:
        end.interrupted()
        sys.stderr.write(f"{name}: {end.why}; what was found until then:\n")


class Pulse:
    """Says at most every ``every_s`` seconds how far a loop has come, on stderr.

    Args:
        now: a monotonic clock in seconds.
    """

    def __init__(self, name: str, now: float, every_s: float = 20.0) -> None:
        self._name, self._every = name, every_s
        self._start = self._next = now
        self._next += every_s

    def beat(self, now: float, text: str) -> bool:
        """Called as often as one likes; whether it said so this time."""
        if now < self._next:
            return False
        self._next = now + self._every
        sys.stderr.write(f"{self._name}: {now - self._start:.0f} s: {text}\n")
        sys.stderr.flush()
        return True
