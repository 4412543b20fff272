"""Jobs, the channel they report through, and how a job can end.

A job is a small picklable dataclass; it names what to run and holds no tensors. It runs in the child and
reports through a :class:`Channel`; the parent gets one :data:`Outcome`. Only :class:`Failed` accuses a
kernel, and only for what happened inside a journalled step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autotune.domain.verdict import FailureKind, UnprovenReason
    from autotune.worker.failure import FaultSite


class Channel(Protocol):
    """The child's line to the parent. Use it from the thread that runs the job."""

    def step(self, text: str, *, launch: bool = True) -> None:
        """Journal what is about to happen; it has reached the parent's pipe when this returns.

        A death, a hang or an exception from here on is put down to this step. An empty text says that our own
        code runs (a reference, bookkeeping): whatever happens then accuses nobody.

        Args:
            launch: count it among the launches; False for a step that only sets a route up.
        """

    def among(self, texts: Sequence[str]) -> Callable[[int | None], None]:
        """Journal steps that will alternate too quickly to send each; none of them is running yet.

        Returns:
            A function that says which step is entered, by its place in ``texts``, or None for our own
            code. It costs one write to memory that the parent shares: timed code can afford it. The
            watchdog's time runs from this call, so call it again from time to time.
        """

    def emit(self, payload: Any) -> None:
        """Hand a picklable payload to the parent's ``on_event``, without waiting for it."""

    def ask(self, payload: Any) -> Any:
        """Hand over a payload and wait for ``on_event``'s answer. The parent's time does not count."""


class Job(Protocol):
    """A picklable piece of work for the child.

    A job may also have ``owners``, the names of the routes whose code it runs (see :attr:`Failed.after`), and
    ``spends(value)``: whether that value says that the child should run no further job.
    """

    def __call__(self, channel: Channel) -> Any:
        """Run in the child. The value must be picklable; it becomes ``Completed.value``."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The job returned ``value``."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The kernel's fault, in ``step``.

    Attributes:
        detail: what was seen, in one line, the last words of the child's output included.
        fault: where in memory, for an access that the arena's handler located.
        steps: journalled launches, this one included.
        after: where the process died or hung: other routes whose jobs it had run before. What one of them
            left behind (a thread, a heap that it damaged) may be what ended it.
    """

    kind: FailureKind
    detail: str
    step: str
    fault: FaultSite | None = None
    steps: int = 0
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Broken:
    """Ours or the machine's fault: nothing is known about the kernel."""

    reason: UnprovenReason
    detail: str
    step: str
    steps: int = 0


@dataclass(frozen=True, slots=True)
class JobError:
    """Our own code raised, outside any step. The child lives on.

    Attributes:
        exc_type: class name, with its module unless it is a builtin.
        message: the exception's text, and where it was raised.
    """

    exc_type: str
    message: str
    step: str = ""
    steps: int = 0


Outcome = Completed | Failed | Broken | JobError


class Runs(Protocol):
    """What runs jobs: a worker, or what stands between it and its user."""

    def run(
        self,
        job: Job,
        *,
        timeout_s: float,
        on_event: Callable[[Any], Any] | None = None,
        step_timeout_s: float | None = None,
    ) -> Outcome:
        """See :meth:`autotune.worker.worker.Worker.run`."""


class ProtocolError(RuntimeError):
    """Parent and child do not speak of the same job: neither can be believed."""


class WorkerError(RuntimeError):
    """No child can be had on this machine: one line that says why."""
