"""One child process with its pipes, made by a fork server that has torch in memory.

Nothing outlives the parent: the fork server asks the kernel to be killed with the parent's main thread,
each child with the fork server. A child leads a session of its own, so that killing its group takes along
whatever it started. What left that session is inherited by the fork server when the child dies, and killed
there; after a SIGKILL of the parent nobody is left to do that.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.worker import child
from autotune.worker.base import WorkerError
from autotune.worker.failure import FaultSite, parse_fault
from autotune.worker.inbox import Inbox
from autotune.worker.preload import PARENT_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkServerProcess

# The first child waits for the fork server to import torch: 1-2 s warm, tens of seconds from a cold disk.
_START_TIMEOUT_S = 120.0
# SIGKILL acts at once unless the process is inside the driver; then it is left to the kernel.
_REAP_TIMEOUT_S = 10.0
_OUTPUT_TAIL_BYTES = 4096
_START_ATTEMPTS = 5
_ORPHAN_SWEEPS = 50

_context = multiprocessing.get_context("forkserver")
_start_lock = threading.Lock()
_living: set[int] = set()  # pids of our children; changed under _start_lock


class InheritedFd:
    """A file descriptor that is valid, under another number, in the process it is sent to."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], InheritedFd], tuple[Any]]:
        return _inherit, (reduction.DupFd(self.number),)


def _inherit(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Hide ``__main__`` and announce our pid while multiprocessing starts something.

    multiprocessing would have each child import the console script again, with all it imports. SIGINT is
    blocked, in what is started too, until the preload module ignores it: a Ctrl-C is the parent's alone.
    """
    main = sys.modules["__main__"]
    with _start_lock:
        resource_tracker.ensure_running()  # it would unblock SIGINT
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        sys.modules["__main__"] = types.ModuleType("__main__")
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            os.environ.pop(PARENT_VARIABLE, None)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_fork_server() -> None:
    """Start the fork server if it is not running; returns while it still imports torch.

    Raises:
        WorkerError: not the main thread. The kernel's death signal follows the thread that started a
            process, so a fork server of a short-lived thread would be killed with it.
    """
    if threading.current_thread() is not threading.main_thread():
        raise WorkerError("a worker must be created in the main thread")
    with _starting():
        _context.set_forkserver_preload(["autotune.worker.preload"])
        forkserver.ensure_running()


def _end_orphans(server: int) -> None:
    """Kill what dead children left behind, and what that leaves behind.

    Living children inherit their own orphans, so whatever the fork server has in a session of its own and is
    none of them belonged to a dead one.
    """
    for _ in range(_ORPHAN_SWEEPS):
        with _start_lock:  # a child that is being made is not in _living yet
            found = _orphans(server)
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def _orphans(server: int) -> list[int]:
    found = []
    try:
        _, own_session = _state(server)
        for tasks in Path(f"/proc/{server}/task").glob("*/children"):
            for pid in map(int, tasks.read_text().split()):
                if pid in _living:
                    continue
                with contextlib.suppress(OSError):
                    state, session = _state(pid)
                    if state != "Z" and session != own_session:
                        found.append(pid)
    except OSError:
        pass  # the fork server is gone, or a kernel without this file
    return found


def _state(pid: int) -> tuple[str, int]:
    """A process's state letter and session."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[3])


class ChildProcess:
    """A running child that has said it is ready.

    Raises:
        WorkerError: it did not come up.
    """

    def __init__(self, device: str, *, guard_allocations: bool = True) -> None:
        self._server_pid: int | None = None
        self.conn, theirs = _context.Pipe()
        self.inbox = Inbox(self.conn.fileno())
        self._fault_fd, fault_write = os.pipe()
        os.set_blocking(self._fault_fd, False)
        # No name on disk: nothing to clean up if we are killed.
        self._output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)
        mark_fd = os.memfd_create("autotune-mark")
        os.ftruncate(mark_fd, mmap.PAGESIZE)
        # Which of several alternating steps is running.
        self.mark = mmap.mmap(mark_fd, mmap.PAGESIZE)
        self._process: ForkServerProcess = _context.Process(
            target=child.serve,
            args=(
                device,
                guard_allocations,
                theirs,
                InheritedFd(fault_write),
                InheritedFd(self._output.fileno()),
                InheritedFd(mark_fd),
            ),
            name=f"autotune {device}",
        )
        try:
            self._start()
        except (OSError, EOFError) as error:
            self._close_pipes()
            raise WorkerError(f"the child process cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(fault_write)
            os.close(mark_fd)
        try:
            self._await_ready()
        except BaseException:
            self.reap(kill=True)
            self.close()
            raise

    def _start(self) -> None:
        for attempt in range(_START_ATTEMPTS):
            try:
                with _starting():
                    self._process.start()
                    _living.add(self.pid)
                return
            # a fork server that was killed refuses us until the kernel has made it a zombie
            except (ConnectionError, EOFError):
                if attempt + 1 == _START_ATTEMPTS:
                    raise
                time.sleep(0.1 * 2**attempt)

    def _await_ready(self) -> None:
        if not self.conn.poll(_START_TIMEOUT_S):
            raise WorkerError(f"the child process was not ready after {_START_TIMEOUT_S:g} s")
        try:
            hello = self.conn.recv()
        except (EOFError, OSError) as error:
            said = self.output_tail().strip().splitlines()
            raise WorkerError(
                f"the child process died while starting: {said[-1] if said else 'it said nothing'}"
            ) from error
        if isinstance(hello, child.Ready):
            self._server_pid = hello.server_pid
        if self._server_pid is None:
            raise WorkerError(
                "the fork server could not preload autotune.worker.preload: install autotune into "
                f"{sys.executable}, or another library in this process has started the fork server first"
            )

    @property
    def pid(self) -> int:
        """Process id, also of its session and group."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exited(self) -> bool:
        """It has ended; its exit status is known."""
        return not self._process.is_alive()

    @property
    def quiet(self) -> bool:
        """It has said nothing since its last job, and its pipe is open."""
        return not (self.inbox.pending or self.conn.poll(0))

    def wait(self, timeout_s: float) -> tuple[bool, bool]:
        """Wait for a message or the end: (a message or end of file is there, the process has ended)."""
        ready = wait([self.conn, self._process.sentinel], timeout_s)
        return self.conn in ready, self._process.sentinel in ready

    def reap(self, *, kill: bool) -> int | None:
        """Wait for the end, and end whatever is left of what it started.

        Args:
            kill: do not wait for it to end by itself.

        Returns:
            The exit status, minus a signal's number; None if it did not end by itself. A process stuck in
            a driver call may outlast even SIGKILL, until that call returns.
        """
        if not kill:
            self._process.join(_REAP_TIMEOUT_S)
        by_itself = self._process.exitcode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if not self.exited:
            # no group yet if it is killed before setsid
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process.join(_REAP_TIMEOUT_S)
        if self.exited:
            with _start_lock:
                _living.discard(self.pid)
            if self._server_pid is not None:
                _end_orphans(self._server_pid)
        return by_itself

    def fault(self) -> FaultSite | None:
        """What the fault handler wrote before the process died."""
        try:
            return parse_fault(os.read(self._fault_fd, 65536))
        except BlockingIOError:
            return None

    def clear_output(self) -> None:
        """Forget what was printed so far; called before each job."""
        self._output.truncate(0)

    def output_tail(self) -> str:
        """The last bytes of stdout and stderr since :meth:`clear_output`."""
        size = os.fstat(self._output.fileno()).st_size
        data = os.pread(self._output.fileno(), _OUTPUT_TAIL_BYTES, max(0, size - _OUTPUT_TAIL_BYTES))
        return data.decode(errors="replace")

    def close(self) -> None:
        """Release every descriptor; the process has been reaped."""
        self._close_pipes()
        # close() refuses a process that is still stuck in the driver
        with contextlib.suppress(ValueError):
            self._process.close()

    def _close_pipes(self) -> None:
        self.conn.close()
        os.close(self._fault_fd)
        self._output.close()
        self.mark.close()


__all__ = ["ChildProcess", "Connection", "InheritedFd", "start_fork_server"]
