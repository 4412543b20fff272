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


@contextlib.contextmanager
def ending(name: str, seconds: float | None = None, grace_s: float = GRACE_S) -> Iterator[None]:
    """Ctrl-C, SIGTERM and the end of its time leave the body where it stands, with a line on stderr.

    What follows the ``with`` block tells what there is; a second signal then ends the process at once. A body
    that waits inside a kernel launch cannot be left: no signal reaches Python there.

    Args:
        name: of the script, in the line.
        seconds: the body's time; ``grace_s`` later it is cut off. None: it has no limit.
    """
    main = threading.main_thread()
    late = threading.Event()

    def cut() -> None:
        # another signal has come first, and the body is on its way out: a second one would kill it
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            return
        late.set()
        # to the main thread by name: a wait for a child is interrupted only there
        signal.pthread_kill(main.ident or 0, signal.SIGTERM)

    try:
        with interruptible():
            timer = None
            if seconds is not None and threading.current_thread() is main:
                timer = threading.Timer(max(0.0, seconds + grace_s), cut)
                timer.daemon = True
                timer.start()
            try:
                yield
            finally:
                if timer is not None:
                    timer.cancel()
                    timer.join()  # a signal on its way arrives while it is still caught
    except Interrupted:
        why = "its time is up" if late.is_set() else "stopped by a signal"
        sys.stderr.write(f"{name}: {why}; what was found until then:\n")


class Pulse:
    """Says at most every ``every_s`` seconds how far a loop has come, on stderr.

    Args:
        now: a monotonic clock in seconds.
    """

    def __init__(self, name: str, now: float, every_s: float = 20.0) -> None:
        self._name, self._every = name, every_s
        self._start = self._next = now
        self._next += every_s

    def beat(self, now: float, text: str) -> None:
        """Called as often as one likes."""
        if now >= self._next:
            self._next = now + self._every
            sys.stderr.write(f"{self._name}: {now - self._start:.0f} s: {text}\n")
            sys.stderr.flush()
