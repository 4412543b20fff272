"""The checks themselves, in the order of :mod:`autotune.checks.catalogue`, whose answers are here too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.checks.catalogue import STATES_LIMITS, expected, names, runs
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

__all__ = ["CHECKS", "STATES_LIMITS", "UNLISTED", "UnknownCheckError", "expected", "get", "names", "runs"]

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


class UnknownCheckError(ValueError):
    """A check was asked for by a name that none has."""


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
