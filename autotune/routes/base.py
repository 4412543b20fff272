"""The ``Route`` protocol: one way to run the attention call, with its metadata preparation.

A route is named by its kernel. It is asked whether it supports a column, opened once per column at a
capacity, prepared before every step (or graph replay), and run once per layer:

    session = route.open(capacity, allocate)   # caller-owned buffers, plan workspaces
    session.prepare(step)                      # host metadata, in place
    session.run(out)                           # what a CUDA graph captures

Third parties add routes through the entry-point group ``autotune.routes``: each entry point names a
class that is constructed without arguments and satisfies this protocol. docs/third-party-route.md has
a template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts


class Family(str, Enum):
    """``decode`` kernels split the KV to fill the device; ``context`` ones tile long queries."""

    DECODE = "decode"
    CONTEXT = "context"


class Capture(str, Enum):
    """Whether ``run`` may be captured in a CUDA graph: freely, with host work before each replay, or not."""

    FREE = "free"
    REPLAN = "replan"
    NO = "no"


class Need(str, Enum):
    """What a route asks of an engine; an engine profile lists what it ``offers``."""

    HOST_KV_LENS = "host_kv_lens"
    UNIFORM_Q_LEN = "uniform_q_len"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step a session will see.

    Attributes:
        column: shape, dtypes, q_len, batch size and max context.
        max_batch_size: rows of ``seq_lens`` and of the page table that a step may have; equals
            ``column.batch_size`` for a captured size, the interval's upper end for an eager one.
        num_pages: pages in the KV pool.
        device: torch device string, ``cpu`` or ``cuda``.
    """

    column: Column
    max_batch_size: int
    num_pages: int
    device: str


@dataclass(slots=True, repr=False)
class Step:
    """Operands of one launch, exactly as an engine hands them over.

    Attributes:
        q: [batch_size x q_len, num_qo_heads, head_dim], request-major; may be a strided view.
        k, v: [num_pages, page_size, num_kv_heads, head_dim] logical NHD views of the engine's pool, any
            strides; the layout is in ``capacity.column.shape.kv_layout``.
        page_table: int32 [batch_size, table_width]; entries past a row's live pages are garbage and must
            not be dereferenced.
        seq_lens: int32 [batch_size], total KV length of each request, the new tokens included and
            already written to the pool.
        host_kv_lens: the same lengths on the host, for routes that need ``host_kv_lens``; else None.
        sm_scale: softmax scale, 1 / sqrt(head_dim) unless a check says otherwise.
        k_scale, v_scale: dequantisation scales of the KV cache (1.0 for unquantised dtypes).
        max_seq_len: the engine's maximum context, which some kernels use to split the KV.
        sinks: fp32 [num_qo_heads], where ``shape.sinks``; else None.
        kv_block_scales: NVFP4 KV only: (k, v) e4m3 [num_pages, page_size, num_kv_heads, head_dim / 16]
            logical NHD views; ``k`` and ``v`` are then uint8 with head_dim / 2 packed elements. Where the
            trtllm-gen kernels run (compute capability 10.x) V's are interleaved by four tokens within a
            page, as engines store them there.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    host_kv_lens: tuple[int, ...] | None
    q_len: int
    sm_scale: float
    k_scale: float
    v_scale: float
    max_seq_len: int
    sinks: torch.Tensor | None = None
    kv_block_scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def __repr__(self) -> str:
        # shapes only: whoever prints a step after its memory was unmapped must not read it
        return f"Step(q {tuple(self.q.shape)}, k {tuple(self.k.shape)}, v {tuple(self.v.shape)})"

    @property
    def batch_size(self) -> int:
        """Requests in this step."""
        return int(self.seq_lens.shape[0])


# ``allocate(name, shape, dtype)``: an uninitialised tensor in the arena on the session's device. Sessions
# take every buffer from it, so that their own workspaces are guarded too.
Allocate = Callable[[str, "tuple[int, ...]", "torch.dtype"], "torch.Tensor"]


class Session(Protocol):
    """An opened route: buffers allocated, ready for steps up to its capacity."""

    def prepare(self, step: Step) -> None:
        """Host-side metadata for ``step``, in place; called before every step or replay, timed apart."""

    def run(self, out: torch.Tensor) -> None:
        """Run attention on the prepared step.

        Args:
            out: [batch_size x q_len, num_qo_heads, head_dim_vo]; every element is written.
        """

    def close(self) -> None:
        """Drop references to buffers; the arena unmaps them."""


@runtime_checkable
class Route(Protocol):
    """One kernel with its metadata preparation. Implementations hold no state."""

    @property
    def name(self) -> str:
        """The kernel's name, such as ``torch-sdpa``; what a table's legend says."""

    @property
    def family(self) -> Family:
        """Decode or context."""

    @property
    def capture(self) -> Capture:
        """CUDA-graph behaviour of ``run``."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the engine must offer."""

    @property
    def deterministic(self) -> bool:
        """Documented to give bitwise equal results for equal operands."""

    @property
    def version(self) -> int:
        """Raised when this adapter changes what it launches: older proofs of it no longer count."""

    def supports(self, column: Column, facts: Facts) -> str | None:
        """None if the route takes this column on this machine, else the reason in one line."""

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """Allocate for ``capacity``. Raises ``ContractError`` if the capacity breaks the route's contract."""
