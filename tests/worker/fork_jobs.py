"""Jobs whose process is there twice; in a module of their own, for the child to import."""

from __future__ import annotations

import os
from dataclasses import dataclass

from autotune.worker.base import Channel
from autotune.worker.child import Numbered, Returned


@dataclass(frozen=True)
class Fork:
    """Forks inside its launch, and both come back; the copy does what the child does."""

    number: int
    fork: bool
    end: str = "return"

    def __call__(self, channel: Channel) -> int:
        enter = channel.among((f"launch {self.number}",)) if self.end == "enter" else None
        if enter is None:
            channel.step(f"launch {self.number}")
        else:
            enter(0)
        if self.fork:
            os.fork()
        if enter is not None:
            enter(None)
        elif self.end == "step":
            channel.step("")
        elif self.end == "emit":
            channel.emit(self.number)
        elif self.end == "ask":
            channel.ask(self.number)
        elif self.end == "raise":
            raise ValueError(str(self.number))
        return self.number


@dataclass(frozen=True)
class AnswerForAnother:
    """Answers with the number of a job before it."""

    def __call__(self, channel: Channel) -> str:
        channel.step("launch")
        job = channel._job  # type: ignore[attr-defined]
        channel._conn.send(Numbered(job - 1, Returned("stale")))  # type: ignore[attr-defined]
        return "own"
