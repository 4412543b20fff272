"""The child's side: one loop that unpickles a job, runs it and answers."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import resource
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from autotune.worker import preload
from autotune.worker.failure import Judgement, judge_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from autotune.worker.base import Job
    from autotune.worker.process import InheritedFd


# The mark's value while none of the alternating steps is running.
NO_STEP = 255


@dataclass(frozen=True, slots=True)
class Ready:
    """The child is set up. ``preloaded`` is false if the fork server could not import our preload module."""

    preloaded: bool


@dataclass(frozen=True, slots=True)
class Stepped:
    """:meth:`Channel.step`, or :meth:`Channel.among` if the shared mark says which of ``texts`` it is."""

    texts: tuple[str, ...]
    launch: bool
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Emitted:
    """:meth:`Channel.emit`, or :meth:`Channel.ask` if ``wants_reply``."""

    payload: Any
    wants_reply: bool


@dataclass(frozen=True, slots=True)
class Returned:
    """The job's value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The job's exception, as text: a pickled traceback would pin its tensors.

    ``judgement`` is None for an error of the job's own code. ``sticky``: this process is spoilt.
    """

    exc_type: str
    message: str
    judgement: Judgement | None = None
    sticky: bool = False


def step_of(texts: tuple[str, ...], mark: mmap.mmap | None) -> str:
    """The step that is running; ``mark`` is None for a single one."""
    index = 0 if mark is None else mark[0]
    return texts[index] if index < len(texts) else ""


class PipeChannel:
    """See :class:`autotune.worker.base.Channel`."""

    def __init__(self, conn: Connection, mark: mmap.mmap) -> None:
        self._conn = conn
        self._mark = mark
        self._texts: tuple[str, ...] = ("",)
        self._marked = False

    @property
    def current(self) -> str:
        """The step that is running."""
        return step_of(self._texts, self._mark if self._marked else None)

    def step(self, text: str, *, launch: bool = True) -> None:
        """A send on a socket pair is in the kernel when it returns: it outlives this process."""
        self._texts, self._marked = (text,), False
        self._conn.send(Stepped((text,), launch))

    def among(self, texts: Sequence[str]) -> Callable[[int | None], None]:
        """The mark is a byte of shared memory: it outlives this process as well."""
        if len(texts) >= NO_STEP:
            raise ValueError(f"at most {NO_STEP - 1} steps can alternate, not {len(texts)}")
        mark = self._mark
        mark[0] = NO_STEP
        self._texts, self._marked = tuple(texts), True
        self._conn.send(Stepped(self._texts, launch=False, marked=True))

        def enter(index: int | None) -> None:
            mark[0] = NO_STEP if index is None else index

        return enter

    def emit(self, payload: Any) -> None:
        """Blocks only while the socket's buffer is full."""
        self._conn.send(Emitted(payload, wants_reply=False))

    def ask(self, payload: Any) -> Any:
        """One question, one answer."""
        self._conn.send(Emitted(payload, wants_reply=True))
        return self._conn.recv()


def serve(
    device: str, conn: Connection, fault_fd: InheritedFd, output_fd: InheritedFd, mark_fd: InheritedFd
) -> None:
    """Entry point of the child process.

    Args:
        device: torch device string; a ``cpu`` child locates faults in the host arena's holes.
        fault_fd: the fault handler writes its line here.
        output_fd: takes stdout and stderr.
        mark_fd: one page shared with the parent; see :meth:`PipeChannel.among`.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for target in (1, 2):
        os.dup2(output_fd.number, target)
    os.close(output_fd.number)
    mark = mmap.mmap(mark_fd.number, mmap.PAGESIZE)
    os.close(mark_fd.number)
    preloaded = preload.server_pid is not None
    if preload.server_pid is not None:
        preload.die_with_parent(preload.server_pid)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if device == "cpu":
        from autotune.arena import fault

        fault.install(fault_fd.number)
    try:
        conn.send(Ready(preloaded))
        while True:
            conn.send_bytes(_answer(conn.recv_bytes(), PipeChannel(conn, mark)))
            gc.collect()
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent is gone or done with us; skip destructors, they may hang


def _answer(pickled_job: bytes, channel: PipeChannel) -> bytes:
    """Run one job; every end of it but death becomes a message."""
    try:
        job: Job = pickle.loads(pickled_job)
    except Exception as error:
        return _dumps(_raised(ImportError(f"the job cannot be loaded: {error}"), ""))
    try:
        value = job(channel)
    # SystemExit and KeyboardInterrupt too: a job cannot end the child by an exception
    except BaseException as error:
        return _dumps(_raised(error, channel.current))
    try:
        return _dumps(Returned(value))
    except Exception as error:
        text = f"the value of {type(job).__name__} ({type(value).__name__}) cannot be pickled: {error}"
        return _dumps(_raised(TypeError(text), ""))


def _dumps(message: Any) -> bytes:
    return bytes(ForkingPickler.dumps(message))


def _raised(error: BaseException, step: str) -> Raised:
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""  # noqa: PTH119
    judged = judge_error(error, step)
    if judged is None:
        return Raised(name, f"{error}{where}")
    judgement, sticky = judged
    return Raised(name, f"{error}{where}", judgement, sticky)
