"""The controls: for each check, planted faults that it must catch, and clean kernels that it must not accuse.

A control runs its own check only, after the clean kernel has passed that check in the same column. What is
expected holds in guarded memory (``host_mmap``, ``cuda_vmm``): elsewhere a stray access may go unseen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from autotune.checks import registry
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.domain.verdict import FailureKind, Requirement
from autotune.routes.planted import Planted
from autotune.routes.planted_cuda import PlantedCuda
from autotune.routes.planted_xqa import COLUMN as XQA_COLUMN
from autotune.routes.planted_xqa import PlantedXqa

if TYPE_CHECKING:
    from autotune.routes.base import Route

KV_LENS = (64, 300)
SEED = 20260501


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a device's controls run.

    Small, and awkward on purpose: q_len divides no tile, and no operand but the KV pool fills its memory
    pages, so that canaries lie behind them. Several page-table entries of every row are dead.
    """

    usual: Column
    one_kv_head: Column
    interval: Column
    scaled: Column
    windowed: Column
    capped: Column


def _columns(page_size: int) -> Columns:
    shape, bf16 = Shape(4, 2, 64, page_size), PROFILES["bf16"]
    return Columns(
        usual=Column(shape, bf16, q_len=3, batch_size=3, max_context=512),
        one_kv_head=Column(Shape(4, 1, 64, page_size), bf16, q_len=3, batch_size=3, max_context=512),
        interval=Column(shape, bf16, q_len=3, batch_size=3, max_context=512, interval=(2, 5)),
        scaled=Column(shape, PROFILES["fp8"], q_len=3, batch_size=3, max_context=512),
        windowed=Column(replace(shape, window_left=40), bf16, q_len=3, batch_size=3, max_context=512),
        # random logits reach 4 or so: most of them are bent by this cap
        capped=Column(replace(shape, soft_cap=2.0), bf16, q_len=3, batch_size=3, max_context=512),
    )


CPU = _columns(16)
# A page as engines have it on a GPU; of one KV head it is 8 KiB, and an id reaches 16 TiB.
CUDA = _columns(64)
COLUMN, ONE_KV_HEAD, INTERVAL = CPU.usual, CPU.one_kv_head, CPU.interval

CLEAN = "planted-clean"


class Stated(str, Enum):
    """What a pass says beyond itself."""

    LIMIT = "limit"


Expected = FailureKind | Requirement | Stated


@dataclass(frozen=True, slots=True)
class Control:
    """A planted kernel and what its check must say.

    Attributes:
        expected: a failure kind; a requirement that a pass must carry; a limit that it must state; None for a
            clean control, which passes without any of them.
        needs: a package, as the facts name it, without which the control is left out.
    """

    name: str
    route: Route
    check: str
    expected: Expected | None
    column: Column = COLUMN
    kv_lens: tuple[int, ...] = field(default=KV_LENS)
    needs: str | None = None

    @property
    def kind(self) -> FailureKind | None:
        """The failure that is expected, if it is one."""
        return self.expected if isinstance(self.expected, FailureKind) else None


def _fault(route: str, check: str, expected: Expected, column: Column = COLUMN) -> Control:
    return Control(route, Planted(route), check, expected, column)


# In the order of the checks. Every check has at least one that ends in a plain finding; those that end the
# process come last, as each costs a new child.
CONTROLS: tuple[Control, ...] = (
    _fault("planted-scale-dropped", "reference", FailureKind.WRONG_OUTPUT),
    _fault("planted-localized-error", "reference", FailureKind.WRONG_OUTPUT),
    _fault("planted-misplaced-rows", "reference", FailureKind.WRONG_OUTPUT),
    _fault("planted-inference-shortcut", "reference", FailureKind.WRONG_OUTPUT),
    _fault("planted-workspace-trusted", "reference", FailureKind.NAN_LEAK),
    _fault("planted-soft-cap-dropped", "reference", FailureKind.WRONG_OUTPUT, CPU.capped),
    _fault("planted-canary-write", "reference", FailureKind.OUT_OF_BOUNDS_WRITE),
    _fault("planted-raises", "reference", FailureKind.LAUNCH_ERROR),
    _fault("planted-full-mask", "position_coded", FailureKind.WRONG_OUTPUT),
    _fault("planted-mask-short", "position_coded", FailureKind.WRONG_OUTPUT),
    _fault("planted-window-edge", "position_coded", FailureKind.WRONG_OUTPUT, CPU.windowed),
    _fault("planted-value-page", "position_coded", FailureKind.WRONG_OUTPUT),
    _fault("planted-unwritten-tail", "poisoned_output", FailureKind.UNWRITTEN_OUTPUT),
    _fault("planted-writes-nan", "poisoned_output", FailureKind.NAN_LEAK),
    _fault("planted-reads-output", "poisoned_output", FailureKind.NAN_LEAK),
    _fault("planted-work-in-prepare", "poisoned_output", FailureKind.NAN_LEAK),
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
    _fault("planted-counter-kept", "stale_state", FailureKind.WRONG_OUTPUT),
    _fault("planted-cached-pages", "stale_state", FailureKind.WRONG_OUTPUT),
    _fault("planted-workspace-dirty", "stale_state", FailureKind.WRONG_OUTPUT),
    _fault("planted-racing", "repeats", FailureKind.NONDETERMINISTIC),
    _fault("planted-racing-documented", "repeats", FailureKind.WRONG_OUTPUT),
    _fault("planted-nan-tail", "nan_pool", Requirement.FINITE_POOL),
    _fault("planted-query-stride", "strides", FailureKind.WRONG_OUTPUT),
    _fault("planted-head-stride", "strides", FailureKind.WRONG_OUTPUT, ONE_KV_HEAD),
    _fault("planted-value-scale-ignored", "scales", FailureKind.WRONG_OUTPUT, CPU.scaled),
    _fault("planted-scales-swapped", "scales", FailureKind.WRONG_OUTPUT, CPU.scaled),
    _fault("planted-scale-kept", "scales", FailureKind.WRONG_OUTPUT, CPU.scaled),
    _fault("planted-finite-infinity", "extreme_logits", Stated.LIMIT),
    _fault("planted-no-maximum", "extreme_logits", FailureKind.NAN_LEAK),
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


def _gpu(fault: str, check: str, expected: Expected, column: Column = CUDA.usual) -> Control:
    name = f"planted-cuda-{fault}"
    return Control(name, PlantedCuda(name), check, expected, column)


# A Triton kernel with the faults of the CPU's and those that only a GPU has. An access outside has no address
# there, so whatever faults is an illegal access.
CUDA_CONTROLS: tuple[Control, ...] = (
    _gpu("scale-dropped", "reference", FailureKind.WRONG_OUTPUT),
    _gpu("localized-error", "reference", FailureKind.WRONG_OUTPUT),
    _gpu("misplaced-rows", "reference", FailureKind.WRONG_OUTPUT),
    _gpu("canary-write", "reference", FailureKind.OUT_OF_BOUNDS_WRITE),
    _gpu("raises", "reference", FailureKind.LAUNCH_ERROR),
    _gpu("full-mask", "position_coded", FailureKind.WRONG_OUTPUT),
    _gpu("mask-short", "position_coded", FailureKind.WRONG_OUTPUT),
    _gpu("value-page", "position_coded", FailureKind.WRONG_OUTPUT),
    _gpu("unwritten-tail", "poisoned_output", FailureKind.UNWRITTEN_OUTPUT),
    _gpu("writes-nan", "poisoned_output", FailureKind.NAN_LEAK),
    _gpu("reads-output", "poisoned_output", FailureKind.NAN_LEAK),
    _gpu("work-in-prepare", "poisoned_output", FailureKind.NAN_LEAK),
    _gpu("extra-row", "poisoned_output", FailureKind.OUT_OF_BOUNDS_WRITE),
    _gpu("scribbled-input", "poisoned_output", FailureKind.OUT_OF_BOUNDS_WRITE),
    _gpu("page-edge", "ragged_lengths", FailureKind.WRONG_OUTPUT),
    _gpu("stale-batch", "interior_batch", FailureKind.WRONG_OUTPUT, CUDA.interval),
    _gpu("pad-nan", "padded_rows", FailureKind.NAN_LEAK),
    _gpu("pad-skipped", "padded_rows", FailureKind.UNWRITTEN_OUTPUT),
    _gpu("garbage-clamped", "table_garbage", FailureKind.NAN_LEAK),
    _gpu("int32-offset", "scattered_pages", FailureKind.WRONG_OUTPUT),
    _gpu("consecutive-pages", "scattered_pages", FailureKind.WRONG_OUTPUT),
    _gpu("counter-kept", "stale_state", FailureKind.WRONG_OUTPUT),
    _gpu("cached-pages", "stale_state", FailureKind.WRONG_OUTPUT),
    _gpu("workspace-dirty", "stale_state", FailureKind.WRONG_OUTPUT),
    _gpu("graph-lengths", "graph_replay", FailureKind.WRONG_OUTPUT),
    _gpu("graph-batch", "graph_replay", FailureKind.WRONG_OUTPUT),
    _gpu("racing", "repeats", FailureKind.NONDETERMINISTIC),
    _gpu("nan-tail", "nan_pool", Requirement.FINITE_POOL),
    _gpu("query-stride", "strides", FailureKind.WRONG_OUTPUT),
    _gpu("head-stride", "strides", FailureKind.WRONG_OUTPUT, CUDA.one_kv_head),
    _gpu("value-scale-ignored", "scales", FailureKind.WRONG_OUTPUT, CUDA.scaled),
    _gpu("scales-swapped", "scales", FailureKind.WRONG_OUTPUT, CUDA.scaled),
    _gpu("finite-infinity", "extreme_logits", Stated.LIMIT),
    _gpu("no-maximum", "extreme_logits", FailureKind.NAN_LEAK),
    # these end the process
    _gpu("read-past-end", "reference", FailureKind.ILLEGAL_ACCESS),
    _gpu("read-before-start", "reference", FailureKind.ILLEGAL_ACCESS),
    _gpu("tail-padding", "reference", FailureKind.ILLEGAL_ACCESS),
    _gpu("write-past-end", "reference", FailureKind.ILLEGAL_ACCESS),
    _gpu("library-overrun", "reference", FailureKind.ILLEGAL_ACCESS),
    _gpu("misaligned", "reference", FailureKind.MISALIGNED),
    _gpu("trap", "reference", FailureKind.LAUNCH_ERROR),
    # Four rows: a table of whole 16-byte units ends flush. A shorter one leaves an entry of canary, page -1.
    _gpu(
        "narrow-table",
        "ragged_lengths",
        FailureKind.ILLEGAL_ACCESS,
        replace(CUDA.usual, batch_size=4),
    ),
    _gpu("garbage-followed", "table_garbage", FailureKind.ILLEGAL_ACCESS),
    Control(
        "planted-xqa-narrow-table",
        PlantedXqa("planted-xqa-narrow-table"),
        "ragged_lengths",
        FailureKind.ILLEGAL_ACCESS,
        XQA_COLUMN,
        needs="flashinfer",
    ),
    _gpu("hang", "reference", FailureKind.HANG),
)
BY_DEVICE = {"cpu": CONTROLS, "cuda": CUDA_CONTROLS}


def controls_count(device: str = "cpu") -> int:
    """How many planted faults there are for a torch device string, whatever packages are missing."""
    return len(BY_DEVICE[device.partition(":")[0]])


def clean(control: Control) -> Control:
    """The clean control that must pass before ``control`` counts: same check, same column."""
    route: Route = Planted(CLEAN)
    if isinstance(control.route, PlantedCuda):
        route = PlantedCuda("planted-cuda-clean")
    elif isinstance(control.route, PlantedXqa):
        route = PlantedXqa("planted-xqa-clean")
    return Control(
        route.name, route, control.check, None, control.column, control.kv_lens, needs=control.needs
    )


def controls(only: str | None = None, device: str = "cpu") -> tuple[Control, ...]:
    """Clean controls, each before the faults of its check and column; then all in their table's order.

    Args:
        only: one check's controls; None: every check's.
        device: ``cpu`` or ``cuda``. Some checks run on one of them only.

    Raises:
        UnknownCheckError: ``only`` names no check, or one without controls for ``device``.
        ValueError: there are no planted kernels for ``device``.
    """
    if device not in BY_DEVICE:
        raise ValueError(f"there are no planted kernels for {device!r}, only for {', '.join(BY_DEVICE)}")
    if only is not None:
        registry.get(only)
    chosen: list[Control] = []
    for control in BY_DEVICE[device]:
        if only in (None, control.check):
            first = clean(control)
            if first not in chosen:
                chosen.append(first)
            chosen.append(control)
    if not chosen:
        raise registry.UnknownCheckError(f"the check {only!r} has no controls for {device}")
    return tuple(chosen)
