"""The controls: for each check, planted faults that it must catch, and clean kernels that it must not accuse.

A control runs its own check only, after the clean kernel has passed that check in the same column. What is
expected holds in guarded memory (``host_mmap``): elsewhere a stray access may go unseen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.checks import registry
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.domain.verdict import FailureKind
from autotune.routes.planted import Planted

# Small, and awkward on purpose: q_len divides no tile, and no operand but the KV pool fills its memory pages,
# so that canaries lie behind them. Several page-table entries of every row are dead.
COLUMN = Column(Shape(4, 2, 64, 16), PROFILES["bf16"], q_len=3, batch_size=3, max_context=512)
ONE_KV_HEAD = Column(Shape(4, 1, 64, 16), PROFILES["bf16"], q_len=3, batch_size=3, max_context=512)
INTERVAL = Column(
    Shape(4, 2, 64, 16), PROFILES["bf16"], q_len=3, batch_size=3, max_context=512, interval=(2, 5)
)
KV_LENS = (64, 300)
SEED = 20260501

CLEAN = "planted-clean"


@dataclass(frozen=True, slots=True)
class Control:
    """A planted kernel and what its check must say.

    Attributes:
        expected: None for a clean control: the check must pass.
    """

    name: str
    route: Planted
    check: str
    expected: FailureKind | None
    column: Column = COLUMN
    kv_lens: tuple[int, ...] = field(default=KV_LENS)


def _fault(route: str, check: str, expected: FailureKind, column: Column = COLUMN) -> Control:
    return Control(route, Planted(route), check, expected, column)


# In the order of the checks. Every check has at least one that ends in a plain finding; those that end the
# process come last, as each costs a new child.
CONTROLS: tuple[Control, ...] = (
    _fault("planted-scale-dropped", "reference", FailureKind.WRONG_OUTPUT),
    _fault("planted-localized-error", "reference", FailureKind.WRONG_OUTPUT),
    _fault("planted-misplaced-rows", "reference", FailureKind.WRONG_OUTPUT),
    _fault("planted-canary-write", "reference", FailureKind.OUT_OF_BOUNDS_WRITE),
    _fault("planted-raises", "reference", FailureKind.LAUNCH_ERROR),
    _fault("planted-full-mask", "position_coded", FailureKind.WRONG_OUTPUT),
    _fault("planted-mask-short", "position_coded", FailureKind.WRONG_OUTPUT),
    _fault("planted-value-page", "position_coded", FailureKind.WRONG_OUTPUT),
    _fault("planted-unwritten-tail", "poisoned_output", FailureKind.UNWRITTEN_OUTPUT),
    _fault("planted-writes-nan", "poisoned_output", FailureKind.NAN_LEAK),
    _fault("planted-reads-output", "poisoned_output", FailureKind.NAN_LEAK),
    _fault("planted-extra-row", "poisoned_output", FailureKind.OUT_OF_BOUNDS_WRITE),
    _fault("planted-scribbled-input", "poisoned_output", FailureKind.OUT_OF_BOUNDS_WRITE),
    _fault("planted-page-edge", "ragged_lengths", FailureKind.WRONG_OUTPUT),
    _fault("planted-stale-batch", "interior_batch", FailureKind.WRONG_OUTPUT, INTERVAL),
    _fault("planted-pad-nan", "padded_rows", FailureKind.NAN_LEAK),
    _fault("planted-pad-skipped", "padded_rows", FailureKind.UNWRITTEN_OUTPUT),
    _fault("planted-pad-shift", "padded_rows", FailureKind.WRONG_OUTPUT),
    _fault("planted-garbage-clamped", "table_garbage", FailureKind.NAN_LEAK),
    _fault("planted-int32-offset", "scattered_pages", FailureKind.WRONG_OUTPUT),
    _fault("planted-consecutive-pages", "scattered_pages", FailureKind.WRONG_OUTPUT),
    _fault("planted-racing", "repeats", FailureKind.NONDETERMINISTIC),
    _fault("planted-racing-documented", "repeats", FailureKind.WRONG_OUTPUT),
    _fault("planted-query-stride", "strides", FailureKind.WRONG_OUTPUT),
    _fault("planted-head-stride", "strides", FailureKind.WRONG_OUTPUT, ONE_KV_HEAD),
    # these end the process
    _fault("planted-read-past-end", "reference", FailureKind.ILLEGAL_ACCESS),
    _fault("planted-read-before-start", "reference", FailureKind.ILLEGAL_ACCESS),
    _fault("planted-tail-padding", "reference", FailureKind.ILLEGAL_ACCESS),
    _fault("planted-write-past-end", "reference", FailureKind.ILLEGAL_ACCESS),
    _fault("planted-narrow-table", "ragged_lengths", FailureKind.ILLEGAL_ACCESS),
    _fault("planted-garbage-followed", "table_garbage", FailureKind.ILLEGAL_ACCESS),
    _fault("planted-abort", "reference", FailureKind.CRASH),
    _fault("planted-null-pointer", "reference", FailureKind.CRASH),
    _fault("planted-freed-memory", "reference", FailureKind.CRASH),
    _fault("planted-hang", "reference", FailureKind.HANG),
)


def clean(control: Control) -> Control:
    """The clean control that must pass before ``control`` counts: same check, same column."""
    return Control(CLEAN, Planted(CLEAN), control.check, None, control.column, control.kv_lens)


def controls(only: str | None = None, device: str = "cpu") -> tuple[Control, ...]:
    """Clean controls, each before the faults of its check and column; then all in the order of ``CONTROLS``.

    Args:
        only: one check's controls; None: every check's.

    Raises:
        UnknownCheckError: ``only`` names no check.
        ValueError: there are no planted kernels for ``device``.
    """
    if device != "cpu":
        raise ValueError(f"there are no planted kernels for {device!r}, only for cpu")
    if only is not None:
        registry.get(only)
    chosen: list[Control] = []
    for control in CONTROLS:
        if only in (None, control.check):
            first = clean(control)
            if first not in chosen:
                chosen.append(first)
            chosen.append(control)
    return tuple(chosen)
