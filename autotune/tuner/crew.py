"""Several children that prove at once. Proofs are not timed, so they may share a device; timing may not.

One thread drives each child; the caller's thread takes the results and stores them, so that the database
has one writer. A check spends most of its time in Python (making operands, mapping memory, judging), which
is why four children on one GPU prove nearly four times as many columns a minute.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.checks.catalogue import STATES_LIMITS
from autotune.domain.verdict import CheckStatus
from autotune.worker.jobs import prove

if TYPE_CHECKING:
    from autotune.domain.cell import Cell, Column
    from autotune.domain.verdict import CheckResult
    from autotune.routes.base import Route
    from autotune.worker.jobs import ProveJob
    from autotune.worker.worker import Worker

# An interrupted crew kills what still runs, and again while a child is being started.
KILL_EVERY_S = 0.1


@dataclass(frozen=True)
class Task:
    """What is missing of one route in one column: run in order, ended by the first failure.

    Attributes:
        jobs: each with what its row is about: the column as a whole, or a cell, whose launches are only
            made once nothing of the column is left unproven.
        nbytes: device memory that one of its launches may need.
    """

    route: Route
    column: Column
    jobs: tuple[tuple[Column | Cell, ProveJob], ...]
    nbytes: int = 0


@dataclass(frozen=True)
class Row:
    """One result, as soon as it is there."""

    task: Task
    target: Column | Cell
    job: ProveJob
    result: CheckResult


class _Memory:
    """Lets tasks in while their needs fit together; one that fits nowhere runs alone."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._used = 0
        self._free = threading.Condition()

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        if self._total is None:
            yield
            return
        with self._free:
            self._free.wait_for(lambda: self._used == 0 or self._used + nbytes <= (self._total or 0))
            self._used += nbytes
        try:
            yield
        finally:
            with self._free:
                self._used -= nbytes
                self._free.notify_all()


class Crew:
    """Workers made in the main thread, driven by threads of this crew.

    Args:
        workers: at least one; the crew does not close them.
        memory_bytes: device memory that tasks may use together; None: no limit.
    """

    def __init__(self, workers: Sequence[Worker], memory_bytes: int | None = None) -> None:
        self.workers = tuple(workers)
        self._memory_bytes = memory_bytes

    def run(self, tasks: Sequence[Task], stopped: Callable[[], bool]) -> Generator[Row, None, None]:
        """Run ``tasks``, yielding each row as it comes; the caller stores it before the next is taken.

        A caller that does not read to the end closes the generator: that kills the children, and what they
        were doing is not recorded.

        Args:
            stopped: asked before each job; True ends the work without losing what is done.

        Raises:
            WorkerError: a child cannot be had.
        """
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        done: queue.SimpleQueue[Row | BaseException | None] = queue.SimpleQueue()
        memory = _Memory(self._memory_bytes)
        halt = threading.Event()

        def work(worker: Worker) -> None:
            try:
                while not halt.is_set() and not stopped():
                    try:
                        task = waiting.get_nowait()
                    except queue.Empty:
                        break
                    with memory.hold(task.nbytes):
                        for row in _run(task, worker, lambda: halt.is_set() or stopped()):
                            done.put(row)
            except BaseException as error:
                done.put(error)
            finally:
                done.put(None)

        crew = self.workers[: max(1, min(len(self.workers), len(tasks)))]
        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in crew]
        for thread in threads:
            thread.start()
        left = len(threads)
        try:
            while left:
                item = done.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            halt.set()
            while any(thread.is_alive() for thread in threads):
                if left:  # interrupted: what still runs would be waited for, up to its time limit
                    for worker in crew:
                        kill_child(worker)
                for thread in threads:
                    thread.join(KILL_EVERY_S)


def kill_child(worker: Worker) -> None:
    """End the worker's child, if it has one at this moment; one that is just starting is met next time."""
    with contextlib.suppress(ProcessLookupError, AttributeError, AssertionError):
        if (pid := worker.pid) is not None:
            os.killpg(pid, signal.SIGKILL)


def _run(task: Task, worker: Worker, stopped: Callable[[], bool]) -> Iterator[Row]:
    complete = True
    for target, job in task.jobs:
        if stopped() or not (complete or target is task.column):
            return
        result = prove(worker, job)
        if stopped() and result.status is CheckStatus.UNPROVEN:
            return  # the child was killed to end this run: that says nothing
        yield Row(task, target, job, result)
        if result.status is CheckStatus.FAILED:
            return
        # a proof is complete without a check that only states limits
        complete = complete and (result.status is not CheckStatus.UNPROVEN or job.check in STATES_LIMITS)
