"""The checks in the order in which they run: broad ones first, so that a wrong kernel costs little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.checks.extreme_logits import ExtremeLogits
from autotune.checks.graph_replay import GraphReplay
from autotune.checks.interior_batch import InteriorBatch
from autotune.checks.nan_pool import NanPool
from autotune.checks.padded_rows import PaddedRows
from autotune.checks.poisoned_output import PoisonedOutput
from autotune.checks.position_coded import PositionCoded
from autotune.checks.ragged_lengths import RaggedLengths
from autotune.checks.reference import Reference
from autotune.checks.repeats import Repeats
from autotune.checks.scales import Scales
from autotune.checks.scattered_pages import ScatteredPages
from autotune.checks.soak import Soak
from autotune.checks.stale_state import StaleState
from autotune.checks.strides import Strides
from autotune.checks.table_garbage import TableGarbage
from autotune.checks.workspace import Workspace

if TYPE_CHECKING:
    from autotune.checks.base import Check
    from autotune.domain.cell import Column

CHECKS: tuple[Check, ...] = (
    Reference(),
    PositionCoded(),
    PoisonedOutput(),
    RaggedLengths(),
    InteriorBatch(),
    PaddedRows(),
    TableGarbage(),
    ScatteredPages(),
    StaleState(),
    GraphReplay(),
    Repeats(),
    NanPool(),
    Strides(),
    Scales(),
    ExtremeLogits(),
)
# Run by name only, and no part of a proof.
UNLISTED: tuple[Check, ...] = (Soak(), Workspace())
# Checks that state how far a route was tried rather than whether it is right: a proof is complete without
# them, and says that they were not run.
STATES_LIMITS = frozenset({"extreme_logits"})


class UnknownCheckError(ValueError):
    """A check was asked for by a name that none has."""


def names() -> tuple[str, ...]:
    """Every check's name, in running order."""
    return tuple(check.name for check in CHECKS)


def get(name: str) -> Check:
    """The check called ``name``.

    Raises:
        UnknownCheckError: there is none; the message lists those that there are.
    """
    for check in (*CHECKS, *UNLISTED):
        if check.name == name:
            return check
    by_name = " and ".join(check.name for check in UNLISTED)
    raise UnknownCheckError(
        f"no check is called {name!r}; the checks are {', '.join(names())}; run by name only: {by_name}"
    )


def expected(column: Column, device: str) -> tuple[str, ...]:
    """Names of the checks without which a proof of ``column`` on ``device`` is not complete; see ``runs``."""
    return tuple(name for name in runs(column, device) if name not in STATES_LIMITS)


def runs(column: Column, device: str) -> tuple[str, ...]:
    """Names of the checks that are run in ``column`` on ``device`` (``cpu`` or ``cuda``).

    ``interior_batch`` is for a column that stands for an interval, ``graph_replay`` for a device that has
    graphs; every other check runs everywhere. One that says nothing about a trial (``Check.applies``)
    leaves a ``not_applicable`` row.
    """
    left_out = set()
    if column.interval is None:
        left_out.add("interior_batch")
    if device.partition(":")[0] != "cuda":
        left_out.add("graph_replay")
    return tuple(name for name in names() if name not in left_out)
