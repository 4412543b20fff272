"""The ``Check`` protocol and what a check is given to work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from autotune.arena.base import Arena, Placement
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.domain.verdict import CheckResult
    from autotune.routes.base import Route

# ``make_arena(placement)`` opens an arena of the device's kind with the proof's slack.
MakeArena = Callable[["Placement"], "Arena"]


@dataclass(frozen=True)
class Trial:
    """One check of one route in one column.

    Attributes:
        kv_lens: total KV lengths over which the check spreads its own; the column's KV rows' ends up to
            max_context.
        pad_value: ``seq_lens`` of a padded row in the engine (SGLang: 1; with q_len added where it does); the
            column's, since a proof holds for no other.
        interval: batch sizes that the proof must cover (``column.interval``), or None.
        device: torch device string.
        launched: called just before each launch with a short description, and with "" after it. The worker
            stores it, so that a crash names the launch that caused it and one of our own names none.
    """

    route: Route
    column: Column
    facts: Facts
    kv_lens: tuple[int, ...]
    seed: int
    device: str
    make_arena: MakeArena
    launched: Callable[[str], None]
    pad_value: int = 1
    slack: int = 0

    def __post_init__(self) -> None:
        if self.pad_value != self.column.pad_value:
            raise ValueError(f"pad_value {self.pad_value} is not the column's {self.column.pad_value}")


class Check(Protocol):
    """One test of one route in one column."""

    @property
    def name(self) -> str:
        """Its name in :mod:`autotune.checks.catalogue`; ``--only`` and ``--skip-check`` take it."""

    @property
    def version(self) -> int:
        """Raised when the check gets stricter: older rows of it no longer count."""

    def applies(self, trial: Trial) -> str | None:
        """None if the check says something about this trial, else why not, in one line."""

    def run(self, trial: Trial) -> CheckResult:
        """Run every launch of the check, in each placement.

        A numeric failure is returned. A fault kills the process: the parent then writes the row.
        """
