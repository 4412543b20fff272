"""A daemon thread that polls a router's file, off every hot path."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.router.router import Router


class Watch:
    """Polls until :meth:`stop`, or until the router is gone: it does not keep it alive.

    A forked child has no such thread; call ``Router.watch`` there.
    """

    def __init__(self, router: Router, interval_s: float) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_poll,
            args=(weakref.ref(router), self._stop, interval_s),
            name="autotune-router-watch",
            daemon=True,
        )
        self._pid = os.getpid()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether this process polls."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread; returns when a poll that is under way has ended."""
        self._stop.set()
        if self.alive and self._thread is not threading.current_thread():
            self._thread.join()


def _poll(router: weakref.ref[Router], stop: threading.Event, interval_s: float) -> None:
    while not stop.wait(interval_s):
        here = router()
        if here is None:
            return
        here.poll(min_interval_s=0.0)
        del here
