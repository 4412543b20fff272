"""CUDA kernels that are wrong on purpose, one fault each: the GPU's controls.

One plain Triton attention (``planted_kernels``), right with ``Fault.NONE``, with a switch for each way in
which a kernel itself goes wrong, and sessions round it that get metadata, graphs or memory wrong. No
FlashInfer, so that they start quickly. Faults that touch memory they do not own do so for real; the hang
ends by itself after 30 seconds, in case nobody watches.

They take no part in ``autotune run``'s search and are not offered by entry point.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from autotune.routes.base import Capture, Family, Need

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Step

HANG_NANOSECONDS = 30 * 10**9
NO_LIMIT = 2**31 - 1
SINK_BYTES = 8192


class Fault(IntEnum):
    """What the kernel does wrong."""

    NONE = 0
    SCALE_DROPPED = 1  # the softmax scale is taken for another head_dim
    LOCALIZED_ERROR = 2  # one head of one row is 5 % too large
    FULL_MASK = 3  # every new token sees all new tokens
    MASK_SHORT = 4  # the mask stops one token early
    VALUE_PAGE = 5  # the V page index runs one page behind K's
    PAGE_EDGE = 6  # a last page that holds a single token is forgotten
    MISPLACED_ROWS = 7  # rows of a q_len that fills no tile land at its remainder
    UNWRITTEN_TAIL = 8  # the last query row is left out
    WRITES_NAN = 9  # one element is NaN
    READS_OUTPUT = 10  # out = 0 * out + result
    PAD_NAN = 11  # a query that sees nothing divides by a sum of zero
    PAD_SKIPPED = 12  # rows shorter than q_len return early
    GARBAGE_CLAMPED = 13  # one page more than is live is loaded with weight zero, a bad id clamped
    GARBAGE_FOLLOWED = 14  # the next page is fetched ahead, whatever its id
    INT32_OFFSET = 15  # the byte offset of a page wraps at 32 bits, a negative one is clamped
    CONSECUTIVE_PAGES = 16  # only the first page of a request is looked up
    QUERY_STRIDE = 17  # query rows are taken to be dense
    HEAD_STRIDE = 18  # the token stride is computed from the head stride
    NAN_TAIL = 19  # V is loaded to the end of the last page, its weights zero
    VALUE_SCALE_IGNORED = 20  # V is taken as stored
    SCALES_SWAPPED = 21  # one scale for both caches, K's
    COUNTER_KEPT = 22  # a counter of finished splits that is not zero loses a split
    SCRIBBLED_INPUT = 23  # a slot of K is used as scratch
    FINITE_INFINITY = 24  # the running maximum starts at -5e4: lower logits all weigh nothing
    NO_MAXIMUM = 25  # the softmax does not take out the largest logit


def _end(tensor: torch.Tensor) -> int:
    """Address after the last element of a view."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


class CudaSession:
    """Correct attention from buffers at fixed addresses; a fault replaces a step or sets the switch."""

    fault = Fault.NONE

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        from autotune.routes import planted_kernels

        self.kernels: Any = planted_kernels
        self.capacity = capacity
        self.shape = capacity.column.shape
        self.allocate = allocate
        rows, width = capacity.max_batch_size, capacity.column.table_width
        self.lens = allocate("route_seq_lens", (rows,), torch.int32)
        self.table = allocate("route_page_table", (rows, width), torch.int32)
        self.counter = allocate("counter", (4,), torch.int32)
        self.counter.zero_()
        self.sink = allocate("sink", (SINK_BYTES,), torch.int8)
        self.factor = 1.0
        self.limit = NO_LIMIT

    def prepare(self, step: Step) -> None:
        """Copy the metadata."""
        self.step = step
        self.batch = step.batch_size
        self.load_lens(step)
        self.load_table(step)

    def load_lens(self, step: Step) -> None:
        """``self.lens`` of the step's requests."""
        self.lens[: step.batch_size].copy_(step.seq_lens)

    def load_table(self, step: Step) -> None:
        """``self.table`` of the step's requests."""
        self.table[: step.batch_size].copy_(step.page_table)

    def run(self, out: torch.Tensor) -> None:
        """One launch."""
        step, shape = self.step, self.shape
        if self.batch == 0:
            return
        self.kernels.attend[(self.batch, shape.num_qo_heads, step.q_len)](
            step.q,
            step.k,
            step.v,
            out,
            self.table,
            self.lens,
            self.counter,
            self.sink,
            step.sm_scale * step.k_scale,
            step.k_scale,
            step.v_scale,
            self.factor,
            *step.q.stride()[:2],
            *step.k.stride()[:3],
            *step.v.stride()[:3],
            *out.stride()[:2],
            self.table.stride(0),
            self.table.shape[1],
            step.k.shape[0],
            step.k.element_size(),
            self.batch,
            step.q_len,
            shape.page_size,
            shape.num_kv_heads,
            shape.group,
            shape.window_left,
            self.limit,
            int(self.fault),
            DIM=shape.head_dim,
            BLOCK=64,
        )

    def poke(self, address: int, count: int, *, write: bool) -> None:
        """Read or zero bytes, whoever owns them."""
        self.kernels.poke[(1,)](address, self.sink, count, int(write), BLOCK=SINK_BYTES)

    def close(self) -> None:
        """Nothing is held."""


SESSIONS: dict[str, type[CudaSession]] = {"planted-cuda-clean": CudaSession}
_S = TypeVar("_S", bound=type[CudaSession])


def _plant(name: str) -> Callable[[_S], _S]:
    def register(session: _S) -> _S:
        SESSIONS[f"planted-cuda-{name}"] = session
        return session

    return register


for _fault in Fault:
    if _fault not in (Fault.NONE, Fault.COUNTER_KEPT):
        _name = _fault.name.lower().replace("_", "-")
        SESSIONS[f"planted-cuda-{_name}"] = type(
            f"_{_fault.name.title().replace('_', '')}", (CudaSession,), {"fault": _fault}
        )


@dataclass(frozen=True)
class PlantedCuda:
    """A route by the name of its fault; picklable, so that a job can carry it.

    Raises:
        ValueError: no fault has that name.
    """

    name: str

    family = Family.DECODE
    capture = Capture.FREE
    needs: frozenset[Need] = frozenset()
    deterministic = True
    version = 1

    def __post_init__(self) -> None:
        if self.name not in SESSIONS:
            raise ValueError(
                f"no planted route is called {self.name!r}; there are {', '.join(sorted(SESSIONS))}"
            )

    def supports(self, column: Column, facts: Facts) -> str | None:
        """Small shapes on CUDA."""
        shape = column.shape
        if facts.device != "cuda":
            return "planted Triton kernels run on CUDA"
        if shape.sinks or shape.soft_cap:
            return "no attention sinks, no soft cap"
        if shape.head_dim != shape.head_dim_vo or shape.head_dim & (shape.head_dim - 1):
            return f"one head_dim, a power of two, not {shape.head_dim} and {shape.head_dim_vo}"
        return None

    def open(self, capacity: Capacity, allocate: Allocate) -> CudaSession:
        """A session with the fault. Needs triton."""
        return SESSIONS[self.name](capacity, allocate)


# --- metadata, state and graphs


@_plant("stale-batch")
class _StaleBatch(CudaSession):
    """Lengths are planned for the largest batch seen and kept until a larger one comes."""

    planned = 0

    def load_lens(self, step: Step) -> None:
        if step.batch_size > self.planned:
            self.planned = step.batch_size
            super().load_lens(step)


@_plant("narrow-table")
class _NarrowTable(CudaSession):
    """The page table is built from KV-only lengths, one page too narrow for ``seq_lens``.

    The kernel reads ceil(seq_len / page) entries of a row: the next request's pages, and past the end of the
    table for the last request.
    """

    def load_table(self, step: Step) -> None:
        longest = int(step.seq_lens.max())
        width = max(1, -(-(longest - step.q_len) // self.shape.page_size))
        self.table = self.allocate("page_table_built", (step.batch_size, width), torch.int32)
        self.table.copy_(step.page_table[:, :width])


@_plant("counter-kept")
class _CounterKept(CudaSession):
    """The counter of finished KV splits is not reset: launches after a long one lose a split."""

    fault = Fault.COUNTER_KEPT

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        split = self.lens[: self.batch].max() > 2 * self.shape.page_size
        self.counter[0] += split.to(torch.int32)


@_plant("workspace-dirty")
class _WorkspaceDirty(CudaSession):
    """The part of the workspace that is documented as zero between launches is not."""

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        super().__init__(capacity, allocate)
        self.zero_after = (self.counter,)

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.counter[3] += 1


@_plant("cached-pages")
class _CachedPages(CudaSession):
    """A copy of K and V is kept until the lengths, the page table or the pool's address change."""

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.key = (step.k.data_ptr(), step.seq_lens.tolist(), step.page_table.tolist())

    def run(self, out: torch.Tensor) -> None:
        if getattr(self, "kept", None) != self.key:
            self.kept, self.copies = self.key, (self.step.k.clone(), self.step.v.clone())
        self.step = replace(self.step, k=self.copies[0], v=self.copies[1])
        super().run(out)


@_plant("work-in-prepare")
class _WorkInPrepare(CudaSession):
    """Attention is computed while the step is prepared, of what the operands held then."""

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.done = step.q.new_empty((*step.q.shape[:2], self.shape.head_dim_vo))
        super().run(self.done)

    def run(self, out: torch.Tensor) -> None:
        out.copy_(self.done)


@_plant("graph-lengths")
class _GraphLengths(CudaSession):
    """The longest length is a host value of the launch: a graph keeps that of its capture."""

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.limit = int(step.seq_lens.max())


@_plant("graph-batch")
class _GraphBatch(CudaSession):
    """Padded rows are zeroed by the host's count of live ones: a graph keeps that of its capture."""

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        live = (step.seq_lens >= step.q_len).nonzero()
        self.batch = int(live[-1]) + 1 if len(live) else 0

    def run(self, out: torch.Tensor) -> None:
        out.zero_()
        super().run(out)


@_plant("racing")
class _Racing(CudaSession):
    """Every third launch adds in another order."""

    calls = itertools.count()

    def run(self, out: torch.Tensor) -> None:
        self.factor = 1 + 2.0**-7 if next(self.calls) % 3 == 2 else 1.0
        super().run(out)


@_plant("raises")
class _Raises(CudaSession):
    """The launch is refused by the library."""

    def run(self, out: torch.Tensor) -> None:
        raise RuntimeError("no kernel was compiled for this q_len")


# --- stray accesses


@_plant("extra-row")
class _ExtraRow(CudaSession):
    """A row after the last one is written: whoever shares the output buffer loses it."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.poke(_end(out), out.stride(0) * out.element_size(), write=True)


@_plant("canary-write")
class _CanaryWrite(CudaSession):
    """8 bytes before the output are written: the engine's alignment padding, or its neighbour."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.poke(out.data_ptr() - 8, 8, write=True)


@_plant("read-past-end")
class _ReadPastEnd(CudaSession):
    """The last tile of V is read in full."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.poke(_end(self.step.v), 4096, write=False)


@_plant("read-before-start")
class _ReadBeforeStart(CudaSession):
    """A window's first tile begins before K does."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.poke(self.step.k.data_ptr() - 64, 64, write=False)


@_plant("tail-padding")
class _TailPadding(CudaSession):
    """The query is read in whole 64-byte vectors: right with padding behind it, a fault without."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.poke(_end(self.step.q), 64, write=False)


@_plant("write-past-end")
class _WritePastEnd(CudaSession):
    """8 KiB after the output are written."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.poke(_end(out), SINK_BYTES, write=True)


@_plant("library-overrun")
class _LibraryOverrun(CudaSession):
    """What the library allocates for itself, through torch, is overrun by 64 bytes."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        scratch = torch.empty(1024, dtype=torch.uint8, device=out.device)
        self.poke(_end(scratch), 64, write=True)


# --- what ends a process


@_plant("misaligned")
class _Misaligned(CudaSession):
    """A 4-byte load from an odd address."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.kernels.misaligned[(1,)](self.step.q.data_ptr(), self.sink)


@_plant("trap")
class _Trap(CudaSession):
    """A device-side check fails."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.kernels.trap[(1,)](self.sink)


@_plant("hang")
class _Hang(CudaSession):
    """A CTA waits for one that never comes; it gives up after 30 seconds."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.kernels.spin[(1,)](self.sink, HANG_NANOSECONDS)
