"""One thread at a time: what several lanes share (database, Optuna, decisions) only the baton's holder uses.

A lane holds the baton whenever it runs the tuner's code and lays it down only while it waits for its
children, which do the work. So nothing else of the tuner knows of threads, and the store has one writer.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from autotune.tuner.crew import Crew

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from types import TracebackType

    from autotune.tuner.crew import Row, Task
    from autotune.worker.base import Job, Outcome, Runs


class HaltedError(Exception):
    """The call is ending: the child was killed for that, and what it was doing says nothing."""


class Baton:
    """A lock that its holder can lay down, and a bell for lanes that wait for each other."""

    def __init__(self) -> None:
        self._turn = threading.Condition(threading.Lock())
        self._halted = threading.Event()

    @property
    def halted(self) -> bool:
        """Whether the call is ending; anyone may ask."""
        return self._halted.is_set()

    def halt(self) -> None:
        """End every lane at its next chance; anyone may call it."""
        self._halted.set()

    def check(self) -> None:
        """Go on only if the call goes on.

        Raises:
            HaltedError: it does not.
        """
        if self.halted:
            raise HaltedError

    def __enter__(self) -> Baton:
        self._turn.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._turn.release()

    @contextlib.contextmanager
    def laid_down(self) -> Iterator[None]:
        """For its holder: others have their turn during the block; after it the baton is held again."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def wait(self) -> None:
        """For its holder: lay the baton down until somebody rings."""
        self._turn.wait()

    def ring(self) -> None:
        """For its holder: wake whoever waits."""
        self._turn.notify_all()


class BatonWorker:
    """A worker whose user holds the baton: laid down while the child works, held while it is answered.

    The time that an answer waits for its turn does not count against the job.
    """

    def __init__(self, worker: Runs, baton: Baton) -> None:
        self._worker = worker
        self._baton = baton

    def run(
        self,
        job: Job,
        *,
        timeout_s: float,
        on_event: Callable[[Any], Any] | None = None,
        step_timeout_s: float | None = None,
    ) -> Outcome:
        """See :meth:`autotune.worker.worker.Worker.run`.

        Raises:
            HaltedError: the call is ending; the outcome is not to be believed.
        """

        def answer(payload: Any) -> Any:
            with self._baton:
                self._baton.check()
                return None if on_event is None else on_event(payload)

        with self._baton.laid_down():
            outcome = self._worker.run(
                job, timeout_s=timeout_s, on_event=answer, step_timeout_s=step_timeout_s
            )
        self._baton.check()
        return outcome


class BatonCrew(Crew):
    """A crew whose user holds the baton: laid down while the next row is waited for.

    Args:
        on_row: told of each row before its user is.
    """

    def __init__(self, crew: Crew, baton: Baton, on_row: Callable[[Row], None]) -> None:
        super().__init__(crew.workers)
        self._crew = crew
        self._baton = baton
        self._on_row = on_row

    def run(self, tasks: Sequence[Task], stopped: Callable[[], bool]) -> Generator[Row, None, None]:
        """See :meth:`autotune.tuner.crew.Crew.run`.

        Raises:
            HaltedError: the call is ending; what was being proven is not recorded.
        """
        rows = self._crew.run(tasks, lambda: self._baton.halted or stopped())
        try:
            while True:
                with self._baton.laid_down():
                    row = next(rows, None)
                self._baton.check()
                if row is None:
                    return
                self._on_row(row)
                yield row
        finally:
            with self._baton.laid_down():
                rows.close()
