"""The parent's side: run jobs in a child that is replaced when one of them spoils it."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import mmap
import os
import pickle
import time
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from autotune.domain.verdict import FailureKind, UnprovenReason
from autotune.worker.base import (
    Broken,
    Completed,
    Failed,
    JobError,
    Outcome,
    ProtocolError,
    WorkerError,
)
from autotune.worker.child import Begun, Emitted, Numbered, Raised, Returned, Stepped, numbered, step_of
from autotune.worker.failure import describe_status, is_opening, judge_death
from autotune.worker.process import ChildProcess, start_fork_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from autotune.worker.base import Job

    # Called with each payload in the order of emit and ask; its value answers an ask.
    OnEvent = Callable[[Any], Any]


# Waiting in slices, a parent notices that it did not run itself: a paused container, a suspended machine.
_SLICE_S = 1.0
# A child may be lost between two jobs: the next one is none the worse for it and gets another.
_MOST_CHILDREN = 3

# Not each worker's own: a message can then be of no other job of this process.
_numbers = itertools.count(1)


class _Watch:
    """What a job is doing, how far it got, and when it is late."""

    def __init__(
        self, timeout_s: float, step_timeout_s: float, mark: mmap.mmap, owners: tuple[str, ...] = ()
    ) -> None:
        self.job = next(_numbers)
        self.owners = owners
        self.begun = False  # the child has taken the job
        self.partial = False  # part of a message has come
        self.timeout_s = timeout_s
        self.step_timeout_s = step_timeout_s
        self.steps = 0
        self._texts: tuple[str, ...] = ("",)
        self._mark = mark
        self._marked = False
        self._started = self._step_started = self._seen = self._heard = time.monotonic()

    @property
    def step(self) -> str:
        """The step that is running; "" if it is our own code."""
        return step_of(self._texts, self._mark if self._marked else None)

    def enter(self, stepped: Stepped) -> None:
        """A step was journalled."""
        self._texts, self._marked = stepped.texts, stepped.marked
        self.steps += stepped.launch and any(stepped.texts)
        self.restart()

    def restart(self) -> None:
        """The step's time begins now."""
        self._step_started = time.monotonic()

    def hear(self) -> None:
        """The child sent something."""
        self._heard = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """Time that the parent used, not the job."""
        self._started += seconds
        self._step_started += seconds
        self._seen += seconds
        self._heard += seconds

    def look(self, expected_s: float) -> None:
        """Called once in every turn of the parent's loop, which should have taken ``expected_s`` at most.

        What it took beyond a slice more the parent itself did not run: whatever stopped it will have
        stopped the child too.
        """
        lost = time.monotonic() - self._seen - expected_s
        if lost > _SLICE_S:
            self.excuse(lost)
        self._seen = time.monotonic()

    def message(self, received: object) -> object:
        """What was said about this job.

        Raises:
            ProtocolError: it is about another one.
        """
        if not isinstance(received, Numbered):
            raise ProtocolError(f"an unnumbered {type(received).__name__}")
        if received.job != self.job:
            raise ProtocolError(f"job {self.job} was answered for job {received.job}")
        return received.message

    @property
    def job_left(self) -> float:
        """Seconds until the whole job is late."""
        return self._started + self.timeout_s - time.monotonic()

    @property
    def step_left(self) -> float:
        """Seconds until the current step is late; our own code has no step and is never late.

        To take a job, or to send the rest of a message, is late as a step is.
        """
        if self.partial or not self.begun:
            return self._heard + self.step_timeout_s - time.monotonic()
        if not any(self._texts):
            return self.job_left
        return self._step_started + self.step_timeout_s - time.monotonic()


class _NotTakenError(Exception):
    """The child ended, or could not be understood, before it took the job: no fault of the job's."""


class Worker:
    """One child process for one device, made on first use and again after it died or was spoilt.

    Use it as a context manager, from the main thread. The child of a failed job is gone when :meth:`run`
    returns; its successor starts with the next call, so the caller stores the outcome in between.

    Args:
        device: torch device string. With an index (``cuda:1``, ``cpu:0``) the child is tied to that one of
            several and knows no other: its jobs say ``cuda`` or ``cpu``.
        step_timeout_s: a step that lasts longer is a hang.
        guard_allocations: CUDA only: guard what a route allocates through torch while a check runs it. A
            worker that only times leaves torch its own allocator.

    Raises:
        WorkerError: not called in the main thread.
    """

    def __init__(self, device: str, *, step_timeout_s: float = 60.0, guard_allocations: bool = True) -> None:
        self.device = device
        self.guard_allocations = guard_allocations
        self.step_timeout_s = step_timeout_s
        self._child: ChildProcess | None = None
        self._served: frozenset[str] = frozenset()  # routes whose jobs the child has run
        self._owner = os.getpid()
        self._running = False
        self._closed = False
        start_fork_server()
        _open_workers.add(self)

    @property
    def pid(self) -> int | None:
        """The living child's process id, if there is one."""
        return self._child.pid if self._child is not None else None

    def run(
        self,
        job: Job,
        *,
        timeout_s: float,
        on_event: OnEvent | None = None,
        step_timeout_s: float | None = None,
    ) -> Outcome:
        """Run ``job`` in the child and wait for its end.

        Everything the job emitted before its end, however it ended, has been given to ``on_event`` when
        this returns. Time spent in ``on_event`` does not count against the job. An exception out of
        ``on_event`` (a Ctrl-C too) kills the child and is raised again.

        A child that is lost before it takes the job is replaced, and the job goes to the next. One that ran
        out of memory is replaced afterwards: it may keep what it took.

        Args:
            timeout_s: for the whole job. Running out of it accuses nobody (``Broken``, budget).
            step_timeout_s: instead of the worker's own.

        Raises:
            WorkerError: no child can be had.
            RuntimeError: called from inside ``on_event``, or after :meth:`close`.
        """
        if self._running or self._closed:
            raise RuntimeError("this worker is " + ("closed" if self._closed else "already running a job"))
        try:
            pickled = bytes(ForkingPickler.dumps(job))
        except Exception as error:
            return JobError(type(error).__name__, f"{type(job).__name__} cannot be pickled: {error}")
        self._running = True
        try:
            limit = self.step_timeout_s if step_timeout_s is None else step_timeout_s
            owners: tuple[str, ...] = getattr(job, "owners", ())
            lost = ""
            for _ in range(_MOST_CHILDREN):
                child = self._living_child()
                watch = _Watch(timeout_s, limit, child.mark, owners)
                try:
                    outcome = self._converse(child, pickled, watch, on_event or _ignore)
                except _NotTakenError as error:
                    lost = str(error)
                    continue
                self._conclude(job, outcome)
                return outcome
            return Broken(UnprovenReason.INFRASTRUCTURE, f"no child took the job: {lost}", "")
        except BaseException:
            self._discard()
            raise
        finally:
            self._running = False

    def recycle(self) -> None:
        """Replace the child: the next job gets a fresh one, whoever ran in the last.

        Raises:
            RuntimeError: called from inside ``on_event``.
        """
        if self._running:
            raise RuntimeError("this worker is already running a job")
        self._discard()

    def close(self) -> None:
        """Kill the child and wait for it. The worker cannot be used again; a second call does nothing."""
        self._closed = True
        _open_workers.discard(self)
        self._discard()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _living_child(self) -> ChildProcess:
        if self._child is not None and (self._child.exited or not self._child.quiet):
            self._discard()  # between two jobs it was killed, or spoke unasked
        if self._child is None:
            self._served = frozenset()
            self._child = ChildProcess(self.device, guard_allocations=self.guard_allocations)
        return self._child

    def _conclude(self, job: Job, outcome: Outcome) -> None:
        """Note whose job the child has run, and replace it if it is spent."""
        self._served |= set(getattr(job, "owners", ()))
        spends = getattr(job, "spends", None)
        if isinstance(outcome, Completed):
            spent = spends is not None and spends(outcome.value)
        else:
            spent = isinstance(outcome, Broken) and outcome.reason is UnprovenReason.OUT_OF_MEMORY
        if spent:
            self._discard()

    def _discard(self) -> None:
        child, self._child = self._child, None
        # after a fork of this process the child belongs to the original
        if child is not None and os.getpid() == self._owner:
            child.reap(kill=True)
            child.close()

    def _converse(self, child: ChildProcess, job: bytes, watch: _Watch, on_event: OnEvent) -> Outcome:
        child.clear_output()
        try:
            child.conn.send_bytes(numbered(watch.job, job))
        except OSError:
            return self._bury(child, watch, on_event, kill=False)
        limit = 0.0
        while True:
            watch.look(limit)
            if watch.job_left <= 0:
                return self._bury(child, watch, on_event, kill=True, late=True)
            limit = max(0.0, min(watch.job_left, watch.step_left, _SLICE_S))
            readable, ended = child.wait(limit)
            watch.look(limit)
            limit = 0.0
            if readable:
                if not child.inbox.fill():
                    return self._bury(child, watch, on_event, kill=False)
                watch.hear()
                outcome = self._receive(child, watch, on_event)
                if outcome is not None:
                    return outcome
                watch.partial = child.inbox.pending
            elif ended:
                return self._bury(child, watch, on_event, kill=False)
            elif watch.step_left <= 0:
                if watch.step or watch.partial or not watch.begun:
                    return self._bury(child, watch, on_event, kill=True)
                watch.restart()  # of several alternating steps none was running

    def _receive(self, child: ChildProcess, watch: _Watch, on_event: OnEvent) -> Outcome | None:
        """Act on every whole message that has come, until one ends the job."""
        messages = child.inbox.messages()
        while True:
            try:
                data = next(messages, None)
                message = None if data is None else watch.message(pickle.loads(data))
            except Exception as error:
                return self._garbled(watch, error)
            if data is None:
                return None
            outcome = self._take(child, message, watch, on_event)
            if outcome is not None:
                return outcome

    def _take(self, child: ChildProcess, message: object, watch: _Watch, on_event: OnEvent) -> Outcome | None:
        """Act on one message; an outcome if it ends the job."""
        if isinstance(message, Begun):
            watch.begun = True
            watch.restart()
            return None
        if isinstance(message, Stepped):
            watch.enter(message)
            return None
        if isinstance(message, Emitted):
            before = time.monotonic()
            reply = on_event(message.payload)
            if message.wants_reply:
                with contextlib.suppress(OSError):  # it died while it waited: its end is judged next
                    child.conn.send(Numbered(watch.job, reply))
            watch.excuse(time.monotonic() - before)
            return None
        if isinstance(message, Returned):
            return Completed(message.value)
        if isinstance(message, Raised):
            return self._raised(message, watch)
        return self._garbled(watch, TypeError(f"an unexpected {type(message).__name__}"))

    def _raised(self, raised: Raised, watch: _Watch) -> Outcome:
        step, steps = watch.step, watch.steps
        found = raised.classified
        if found is None:
            return JobError(raised.exc_type, raised.message, step, steps)
        if found.sticky:
            self._discard()
        blame, detail = found.blame, found.detail
        if isinstance(blame, FailureKind):
            return Failed(blame, detail, step, steps=steps)
        return Broken(blame, detail, step, steps)

    def _garbled(self, watch: _Watch, error: Exception) -> Outcome:
        detail = f"the child sent what cannot be read: {type(error).__name__}: {error}"
        outcome = Broken(UnprovenReason.INFRASTRUCTURE, detail, watch.step, watch.steps)
        self._discard()
        if not watch.begun:
            raise _NotTakenError(detail)
        return outcome

    def _bury(
        self, child: ChildProcess, watch: _Watch, on_event: OnEvent, *, kill: bool, late: bool = False
    ) -> Outcome:
        """Judge a child that ended (or is late and ``kill`` ends it), after everything it still said."""
        status = child.reap(kill=kill)
        try:
            last = self._drain(child, watch, on_event)
            if last is not None:
                return last
            if not watch.begun:
                raise _NotTakenError("it did not answer" if status is None else describe_status(status))
            if late:
                detail = f"stopped after {watch.timeout_s:g} s"
                return Broken(UnprovenReason.BUDGET, detail, watch.step, watch.steps)
            # whose operands were left tells who left them; only other deaths may be an earlier route's
            after = tuple(sorted(self._served - set(watch.owners)))
            if kill:
                detail = f"no progress for {watch.step_timeout_s:g} s"
                if watch.partial:
                    detail = f"it sent part of a message, then nothing for {watch.step_timeout_s:g} s"
                elif is_opening(watch.step):
                    detail = f"nothing was launched: {detail}"
                else:
                    return Failed(FailureKind.HANG, detail, watch.step, steps=watch.steps, after=after)
                return Broken(UnprovenReason.INFRASTRUCTURE, detail, watch.step, watch.steps)
            if status is None:
                detail = "the child closed its pipe and lived on"
                return Broken(UnprovenReason.INFRASTRUCTURE, detail, watch.step, watch.steps)
            fault = child.fault()
            judged = judge_death(status, watch.step, fault, child.output_tail())
            if isinstance(judged.blame, FailureKind):
                if judged.blame is FailureKind.ILLEGAL_ACCESS:
                    after = ()
                return Failed(judged.blame, judged.detail, watch.step, fault, watch.steps, after)
            return Broken(judged.blame, judged.detail, watch.step, watch.steps)
        finally:
            self._discard()

    def _drain(self, child: ChildProcess, watch: _Watch, on_event: OnEvent) -> Outcome | None:
        """Take what is still in the pipe of a dead child; a job that had returned has completed."""
        while True:
            messages = child.inbox.messages()
            while True:
                try:
                    data = next(messages, None)
                    message = None if data is None else watch.message(pickle.loads(data))
                except Exception:
                    return None  # not about this job
                if data is None:
                    break
                outcome = self._take(child, message, watch, on_event)
                if outcome is not None:
                    return outcome
            # a message cut off by the death stays where it is
            if not child.conn.poll(0) or not child.inbox.fill():
                return None


def _ignore(payload: Any) -> None:
    return None


_open_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_open_workers):
        worker.close()


__all__ = ["Worker", "WorkerError"]
