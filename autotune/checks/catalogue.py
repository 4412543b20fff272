"""Names and versions of the checks, without their bodies: what reads stored proofs need not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.domain.cell import Column

# Of a proof, in the order in which they run: broad ones first, so that a wrong kernel costs little.
# A version is raised when the check gets stricter: older rows of it no longer count.
LISTED = {
    "reference": 2,
    "position_coded": 2,
    "poisoned_output": 2,
    "ragged_lengths": 2,
    "interior_batch": 2,
    "padded_rows": 2,
    "table_garbage": 2,
    "scattered_pages": 2,
    "stale_state": 2,
    "graph_replay": 2,
    "repeats": 2,
    "nan_pool": 2,
    "strides": 2,
    "scales": 2,
    "extreme_logits": 1,
}
# Run by name only, and no part of a proof.
UNLISTED = {"soak": 1, "workspace": 1}
VERSIONS = {**LISTED, **UNLISTED}
# Checks that state how far a route was tried rather than whether it is right: a proof is complete without
# them, and says that they were not run.
STATES_LIMITS = frozenset({"extreme_logits"})


def names() -> tuple[str, ...]:
    """Every check of a proof, in running order."""
    return tuple(LISTED)


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
    return tuple(name for name in LISTED if name not in left_out)
