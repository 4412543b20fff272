"""Ctrl-C and SIGTERM: both unwind the run, so that it is left resumable and no child stays behind."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN_S = 0.01
#: A library that blocks inside its bookkeeping (a server that does not answer) is interrupted all the same.
_PATIENCE = 100
#: Where an exception out of nowhere is logged or lost instead of raised: SQLAlchemy's pool logs a traceback
#: for what reaches it while a connection goes back, and the interpreter drops what a weak reference's
#: callback or a finalizer raises.
_BOOKKEEPING = ("sqlalchemy.pool", "weakref", "_weakrefset", "multiprocessing.util")


class Interrupted(BaseException):
    """A signal asked the command to end.

    Not a ``KeyboardInterrupt``: the parser would turn that into an exit without a word.
    """


def in_bookkeeping(frame: FrameType | None) -> bool:
    """Whether the code that a signal met may not be interrupted: any of its callers counts."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if frame.f_code.co_name == "__del__" or module.startswith(_BOOKKEEPING):
            return True
        frame = frame.f_back
    return False


class _Interruption:
    """Raises :class:`Interrupted` in the main thread, as soon as the code there can take it."""

    def __init__(self) -> None:
        self._left = _PATIENCE
        self._timer: tuple[float, float] | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self._raise_or_wait(number, frame)

    def _raise_or_wait(self, number: int, frame: FrameType | None) -> None:
        if self._left > 0 and in_bookkeeping(frame):
            self._left -= 1
            self.again()
            return
        raise Interrupted

    def again(self) -> None:
        """Try once more in a moment: the alarm comes to the main thread, wherever that is by then."""
        signal.signal(signal.SIGALRM, self._raise_or_wait)
        timer = signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        self._timer = self._timer or timer

    def end(self) -> None:
        """No alarm of ours comes any more: by default one would kill the process."""
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def give_back(self) -> None:
        """The alarm as it was found, once its own handler is back."""
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise :class:`Interrupted` in the main thread at the first signal; a second one kills.

    The kernel then takes the children along, as after kill -9. Inside a library's bookkeeping the exception
    waits until that is done, for a second at most; one that a finalizer swallowed is raised again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    interruption = _Interruption()
    report = sys.unraisablehook

    def on_unraisable(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is Interrupted and threading.current_thread() is threading.main_thread():
            interruption.again()
        else:
            report(lost)

    # one that our parent has us ignore (nohup, a background job of sh) stays ignored
    before = {each: signal.getsignal(each) for each in (*_SIGNALS, signal.SIGALRM)}
    for each in _SIGNALS:
        if before[each] is not signal.SIG_IGN:
            signal.signal(each, interruption.on_signal)
    sys.unraisablehook = on_unraisable
    try:
        yield
    finally:
        interruption.end()
        sys.unraisablehook = report
        for each, handler in before.items():
            signal.signal(each, handler)
        interruption.give_back()
