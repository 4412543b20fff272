"""The checks in the order in which they run: broad ones first, so that a wrong kernel costs little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.checks.interior_batch import InteriorBatch
from autotune.checks.padded_rows import PaddedRows
from autotune.checks.poisoned_output import PoisonedOutput
from autotune.checks.position_coded import PositionCoded
from autotune.checks.ragged_lengths import RaggedLengths
from autotune.checks.reference import Reference
from autotune.checks.repeats import Repeats
from autotune.checks.scattered_pages import ScatteredPages
from autotune.checks.strides import Strides
from autotune.checks.table_garbage import TableGarbage

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
    Repeats(),
    Strides(),
)


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
    for check in CHECKS:
        if check.name == name:
            return check
    raise UnknownCheckError(f"no check is called {name!r}; the checks are {', '.join(names())}")


def expected(column: Column, device: str) -> tuple[str, ...]:
    """Names of the checks that a proof of ``column`` needs on ``device`` (``cpu`` or ``cuda``).

    Every check runs on every device; ``interior_batch`` only for a column that stands for an interval. A
    check that says nothing about a trial (``Check.applies``) leaves a ``not_applicable`` row.
    """
    del device  # device-specific checks (graph replay, sanitizer) will ask for it
    return tuple(name for name in names() if name != "interior_batch" or column.interval is not None)
