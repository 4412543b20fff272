"""``fmha-v2``: ``trtllm_fmha_v2_prefill``, the context kernel of SGLang's ``trtllm_mha`` backend on SM90.

It takes strides from shapes, so the pool must be contiguous. SGLang's is one allocation whose halves are K
and V: the kernel then addresses V relative to K's start, through a table that holds both.

``save_softmax_stats`` is never passed: with a paged layout the library ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.domain.shape import KvLayout
from autotune.routes.arithmetic import Arithmetic
from autotune.routes.base import Capture, Family, Need
from autotune.routes.flashinfer import limits
from autotune.routes.flashinfer.call import Call
from autotune.routes.flashinfer.installed import Installed
from autotune.routes.flashinfer.layout import block_delta
from autotune.routes.flashinfer.metadata import (
    WORKSPACE_BYTES,
    load_cumulative_kv,
    torch_dtype,
    uniform_offsets,
)
from autotune.routes.flashinfer.scales import bmm_scales
from autotune.routes.flashinfer.session import FunctionSession

if TYPE_CHECKING:
    import torch

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Session, Step

TARGET = "flashinfer.prefill:trtllm_fmha_v2_prefill"
HEAD_DIMS = (32, 40, 48, 64, 80, 96, 104, 128, 160, 192, 256)
FUSED = (KvLayout.FUSED_NHD, KvLayout.FUSED_HND)
SEPARATE = (KvLayout.SEPARATE_NHD, KvLayout.SEPARATE_HND)


def query_dtype(column: Column) -> str:
    """An e4m3 KV cache takes an e4m3 query; quantising it is part of the launch, as in SGLang."""
    return limits.E4M3 if column.dtypes.kv == limits.E4M3 else column.dtypes.q


def pool(step: Step, kv_layout: str) -> Any:
    """K and V as the kernel takes them: the halves of a fused pool, or the interleaved 5-D pool.

    Raises:
        ValueError: the step's views are not of the layout that the column names.
    """
    layout = KvLayout(kv_layout)
    swap = layout.value.endswith("hnd")
    k, v = (step.k.transpose(1, 2), step.v.transpose(1, 2)) if swap else (step.k, step.v)
    if layout in FUSED:
        return k, v
    # [:, 0] and [:, 1] of one [pages, 2, ...] tensor: step back from K's view to the pool
    if v.data_ptr() - k.data_ptr() != k[0].numel() * k.element_size() or k.stride(0) != 2 * k[0].numel():
        raise ValueError(f"K and V are not the halves of an {layout.value} pool's pages")
    strides = (k.stride(0), k[0].numel(), *k.stride()[1:])
    return k.as_strided((k.shape[0], 2, *k.shape[1:]), strides, k.storage_offset())


def call(
    step: Step,
    query: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    *,
    kv_layout: str,
    workspace: torch.Tensor,
    window_left: int,
    soft_cap: float,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
) -> Call:
    """One launch, less its output.

    Args:
        table: int32 [batch, width]; for a fused pool [batch, 2, width], K's pages and then V's, both counted
            from K's start.
    """
    scales = bmm_scales(step)
    return Call(
        TARGET,
        {
            "qkv": (query, pool(step, kv_layout)),
            "input_layout": "Q_PAGED_KV_HND" if kv_layout.endswith("hnd") else "Q_PAGED_KV_NHD",
            "workspace_buffer": workspace,
            "seq_lens": seq_lens,
            "max_q_len": step.q_len,
            "max_kv_len": step.max_seq_len,
            "bmm1_scale": scales.bmm1,
            "bmm2_scale": scales.bmm2,
            "batch_size": step.batch_size,
            "cum_seq_lens_q": cum_seq_lens_q,
            "cum_seq_lens_kv": cum_seq_lens_kv,
            "block_tables": table,
            "sinks": step.sinks,
            "logits_soft_cap_scale": soft_cap or None,
            "mask_mode": "sliding_window" if window_left >= 0 else "causal",
            "window_left": window_left,
        },
    )


class FmhaV2(Installed):
    """fmha-v2 on SM90, and on SM12x in 16 bit."""

    name = "fmha-v2"
    family = Family.CONTEXT
    capture = Capture.FREE
    needs: frozenset[Need] = frozenset()
    deterministic = False
    version = 1

    def supports(self, column: Column, facts: Facts) -> str | None:
        """See ``Route.supports``."""
        shape, dtypes, kernel = column.shape, column.dtypes, "fmha-v2"
        if reason := limits.device(facts, (9, 12), kernel):
            return reason
        if dtypes.q not in (*limits.SIXTEEN_BIT, limits.E4M3):
            return f"fmha-v2 takes a query in bf16, fp16 or e4m3, not {dtypes.q}"
        if dtypes.kv in limits.SIXTEEN_BIT and dtypes.q == limits.E4M3:
            return f"fmha-v2 needs KV of the query's dtype e4m3, not {dtypes.kv}"
        found = limits.capability(facts)
        if dtypes.kv == limits.E4M3 and found is not None and found[0] == 12:
            return "fmha-v2 has no fp8 on compute capability 12.x"
        if dtypes.kv == limits.E4M3 and shape.soft_cap:
            return "fmha-v2 with fp8 has no tested logits soft cap"
        if dtypes.kv in limits.SIXTEEN_BIT and dtypes.out != dtypes.q:
            return f"fmha-v2 writes the query's dtype {dtypes.q}, not {dtypes.out}"
        if dtypes.out not in (*limits.SIXTEEN_BIT, limits.E4M3):
            return f"fmha-v2 writes bf16, fp16 or e4m3, not {dtypes.out}"
        if KvLayout(shape.kv_layout) in SEPARATE:
            return "fmha-v2 needs K and V in one allocation (a fused or interleaved pool)"
        if KvLayout(shape.kv_layout).packed:
            return "fmha-v2 takes strides from shapes; in a packed pool V lies between K's rows"
        return limits.first(
            limits.kv_dtype(column, (*limits.SIXTEEN_BIT, limits.E4M3), kernel),
            limits.same_16_bit(column, kernel),
            limits.equal_head_dims(column, kernel),
            limits.head_dims(column, HEAD_DIMS, kernel),
        )

    def arithmetic(self, column: Column, facts: Facts) -> Arithmetic:
        """See ``Arithmetic``."""
        return limits.FP8_ARITHMETIC if query_dtype(column) == limits.E4M3 else Arithmetic()

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``."""
        return _Session(capacity, allocate)


class _Session(FunctionSession):
    target = TARGET

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        import torch

        column = capacity.column
        super().__init__(capacity, allocate, torch_dtype(query_dtype(column)))
        batch = capacity.max_batch_size
        self._allocate = allocate
        self._workspace = allocate("workspace", (WORKSPACE_BYTES,), torch.uint8)
        self._cum_q = allocate("cum_seq_lens_q", (batch + 1,), torch.int32)
        uniform_offsets(self._cum_q, column.q_len)
        self._cum_kv = allocate("cum_seq_lens_kv", (batch + 1,), torch.int32)
        self._cum_kv.zero_()
        self._offsets: torch.Tensor | None = None

    def _expanded(self, step: Step, table: torch.Tensor) -> torch.Tensor:
        import torch

        batch, width = table.shape
        if self._offsets is None or self._offsets.shape[2] != width:
            self._offsets = self._allocate(
                "kv_offsets", (self._capacity.max_batch_size, 2, width), torch.int32
            )
        offsets = self._offsets[:batch]
        offsets[:, 0].copy_(table)
        torch.add(table, block_delta(step.k, step.v), out=offsets[:, 1])
        return offsets

    def build(self, step: Step, query: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> Call:
        shape = self._capacity.column.shape
        if KvLayout(shape.kv_layout) in FUSED:
            table = self._expanded(step, table)
        return call(
            step,
            query,
            seq_lens,
            table,
            kv_layout=shape.kv_layout,
            workspace=self._workspace,
            window_left=shape.window_left,
            soft_cap=shape.soft_cap,
            cum_seq_lens_q=self._cum_q[: step.batch_size + 1],
            cum_seq_lens_kv=load_cumulative_kv(self._cum_kv, seq_lens),
        )
