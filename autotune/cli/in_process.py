"""A proof in this very process, for tools that watch a process: compute-sanitizer, cuda-gdb, ncu.

Nothing is isolated: a fault of the kernel ends the command, on the CPU by its signal.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from autotune.domain.verdict import FailureKind
from autotune.sanitizer.tool import LIMIT_VARIABLE
from autotune.worker.base import Broken, Completed, Failed, JobError
from autotune.worker.failure import classify
from autotune.worker.jobs import row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autotune.domain.verdict import CheckResult
    from autotune.worker.base import Outcome
    from autotune.worker.jobs import ProveJob


class Journal:
    """A :class:`autotune.worker.base.Channel` that only remembers the step, nobody being there to tell."""

    def __init__(self) -> None:
        self.step_text = ""
        self.steps = 0

    def step(self, text: str, *, launch: bool = True) -> None:
        """See :class:`autotune.worker.base.Channel`."""
        self.step_text = text
        self.steps += bool(text) and launch

    def among(self, texts: Sequence[str]) -> Callable[[int | None], None]:
        """See :class:`autotune.worker.base.Channel`."""

        def enter(index: int | None) -> None:
            self.step_text = "" if index is None else texts[index]

        return enter

    def emit(self, payload: Any) -> None:
        """Dropped: a proof says nothing on its way."""

    def ask(self, payload: Any) -> Any:
        """Nobody answers."""
        return None


def limit_time() -> None:
    """Let the kernel end this process after the seconds that the environment names, whatever it hangs in."""
    seconds = os.environ.get(LIMIT_VARIABLE, "")
    if seconds.isdigit():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(seconds))


def prove_here(job: ProveJob) -> CheckResult:
    """Run ``job`` in this process and make its row, from its value or from what it raised."""
    import torch

    torch.set_num_threads(1)  # as in the worker's child: its launches, and its memory, are to be the same
    journal = Journal()
    outcome: Outcome
    try:
        outcome = Completed(job(journal))
    except Exception as error:
        outcome = _outcome(error, journal)
    return row_of(job, outcome)


def _outcome(error: Exception, journal: Journal) -> Outcome:
    step, steps = journal.step_text, journal.steps
    found = classify(error, step)
    if found is None:
        return JobError(type(error).__name__, str(error), step, steps)
    if isinstance(found.blame, FailureKind):
        return Failed(found.blame, found.detail, step, steps=steps)
    return Broken(found.blame, found.detail, step, steps)
