"""The child's side: one loop that unpickles a job, runs it and answers."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import resource
import signal
import struct
import traceback
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from autotune.worker import preload
from autotune.worker.base import ProtocolError
from autotune.worker.failure import OURS_STATUS, Classified, classify
from autotune.worker.pin import pin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from autotune.worker.base import Job
    from autotune.worker.process import InheritedFd


# The mark's value while none of the alternating steps is running.
NO_STEP = 255


# Before each pickled job: its number. Every message about it carries that number, in both directions.
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Ready:
    """The child is set up.

    ``server_pid``: the fork server's; None if it could not import our preload module.
    """

    server_pid: int | None


@dataclass(frozen=True, slots=True)
class Numbered:
    """A message about job ``job``: an answer to one cannot be taken for an answer to another."""

    job: int
    message: Any


@dataclass(frozen=True, slots=True)
class Begun:
    """The child has taken the job: what happens to it from here on is the job's."""


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

    ``classified`` is None for an error of the job's own code.
    """

    exc_type: str
    message: str
    classified: Classified | None = None


def numbered(job: int, pickled: bytes) -> bytes:
    """A job as it is sent to the child."""
    return _NUMBER.pack(job) + pickled


def step_of(texts: tuple[str, ...], mark: mmap.mmap | None) -> str:
    """The step that is running; ``mark`` is None for a single one."""
    index = 0 if mark is None else mark[0]
    return texts[index] if index < len(texts) else ""


class PipeChannel:
    """See :class:`autotune.worker.base.Channel`. Only the process that made it can speak through it.

    Args:
        job: its number.
    """

    def __init__(self, conn: Connection, mark: mmap.mmap, job: int) -> None:
        self._conn = conn
        self._mark = mark
        self._job = job
        self._pid = os.getpid()
        self._texts: tuple[str, ...] = ("",)
        self._marked = False

    @property
    def current(self) -> str:
        """The step that is running."""
        return step_of(self._texts, self._mark if self._marked else None)

    def end_copy(self) -> None:
        """End this process if it is a fork of the child.

        A kernel that forks and comes back twice would answer twice and take the next job from the child.
        """
        if os.getpid() != self._pid:
            os._exit(1)

    def say(self, message: Any) -> None:
        """Send a message about this job."""
        self.end_copy()
        self._conn.send(Numbered(self._job, message))

    def answer(self, message: Any) -> None:
        """Send the job's end.

        Raises:
            Exception: it cannot be pickled; nothing was sent.
        """
        pickled = bytes(ForkingPickler.dumps(Numbered(self._job, message)))
        self.end_copy()
        self._conn.send_bytes(pickled)

    def step(self, text: str, *, launch: bool = True) -> None:
        """A send on a socket pair is in the kernel when it returns: it outlives this process."""
        self.end_copy()
        self._texts, self._marked = (text,), False
        self.say(Stepped((text,), launch))

    def among(self, texts: Sequence[str]) -> Callable[[int | None], None]:
        """The mark is a byte of shared memory: it outlives this process as well."""
        if len(texts) >= NO_STEP:
            raise ValueError(f"at most {NO_STEP - 1} steps can alternate, not {len(texts)}")
        self.end_copy()
        mark = self._mark
        mark[0] = NO_STEP
        self._texts, self._marked = tuple(texts), True
        self.say(Stepped(self._texts, launch=False, marked=True))

        def enter(index: int | None) -> None:
            self.end_copy()
            mark[0] = NO_STEP if index is None else index

        return enter

    def emit(self, payload: Any) -> None:
        """Blocks only while the socket's buffer is full."""
        self.say(Emitted(payload, wants_reply=False))

    def ask(self, payload: Any) -> Any:
        """One question, one answer."""
        self.say(Emitted(payload, wants_reply=True))
        reply = self._conn.recv()
        if not (isinstance(reply, Numbered) and reply.job == self._job):
            raise ProtocolError(f"asked for job {self._job}, the reply is about another")
        return reply.message


def serve(
    device: str,
    guard_allocations: bool,
    conn: Connection,
    fault_fd: InheritedFd,
    output_fd: InheritedFd,
    mark_fd: InheritedFd,
) -> None:
    """Entry point of the child process.

    Args:
        device: torch device string, to which the child is tied if it has an index; a CPU child locates
            faults in the host arena's holes. A CUDA fault has no address that a process can learn, only the
            launch that it is put down to.
        guard_allocations: CUDA only: guard what a route allocates through torch.
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
    if preload.server_pid is not None:
        preload.die_with_parent(preload.server_pid)
        preload.inherit_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pin(device)
    if device.partition(":")[0] == "cpu":
        from autotune.arena import fault

        fault.install(fault_fd.number)
    elif guard_allocations:
        from autotune.arena import cuda_allocator

        cuda_allocator.install()  # its callbacks must not outlive us: this process ends by os._exit
    try:
        conn.send(Ready(preload.server_pid))
        while True:
            request = conn.recv_bytes()
            channel = PipeChannel(conn, mark, *_NUMBER.unpack_from(request))
            channel.say(Begun())
            _run(request[_NUMBER.size :], channel)
            gc.collect()
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent is gone or done with us; skip destructors, they may hang
    except BaseException:
        # a job's every end has been caught: this is our own code's, whatever step is still journalled
        with contextlib.suppress(BaseException):
            traceback.print_exc()
        os._exit(OURS_STATUS)


def _run(pickled: bytes, channel: PipeChannel) -> None:
    """Run one job; every end of it but death becomes a message."""
    try:
        job: Job = pickle.loads(pickled)
    except MemoryError as error:
        channel.answer(_raised(error, ""))
        return
    except BaseException as error:
        channel.answer(_raised(ImportError(f"the job cannot be loaded: {error}"), ""))
        return
    try:
        value = job(channel)
    # SystemExit and KeyboardInterrupt too: a job cannot end the child by an exception
    except BaseException as error:
        channel.answer(_raised(error, channel.current))
        return
    try:
        channel.answer(Returned(value))
    except ConnectionError:
        raise  # the parent is gone
    except MemoryError as error:
        channel.answer(_raised(error, ""))
    except BaseException as error:
        text = f"the value of {type(job).__name__} ({type(value).__name__}) cannot be pickled: {error}"
        channel.answer(_raised(TypeError(text), ""))


def _raised(error: BaseException, step: str) -> Raised:
    cls = type(error)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""  # noqa: PTH119
    return Raised(name, f"{error}{where}", classify(error, step))
