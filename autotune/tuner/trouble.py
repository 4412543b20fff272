"""How a job ended that did not complete, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.worker.base import JobError

if TYPE_CHECKING:
    from autotune.worker.base import Broken, Failed


def explain(outcome: Failed | Broken | JobError) -> str:
    """What happened, and in which step."""
    said = f"{outcome.exc_type}: {outcome.message}" if isinstance(outcome, JobError) else outcome.detail
    where = f" ({outcome.step})" if outcome.step else ""
    return " ".join(f"{said}{where}".split())
