"""``fa2`` and ``fa3``: ``BatchPrefillWithPagedKVCacheWrapper``, planned on the host before every step.

``fa2`` splits the KV, so it fills the device at small batches although its family is the context one;
``fa3`` has no split for short queries. ``plan`` cannot be captured; ``run`` can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.routes.arithmetic import Arithmetic
from autotune.routes.base import Capture, Family, Need
from autotune.routes.flashinfer import limits
from autotune.routes.flashinfer.call import Call
from autotune.routes.flashinfer.installed import Installed
from autotune.routes.flashinfer.metadata import torch_dtype
from autotune.routes.flashinfer.planned import PageLists, PlannedSession

if TYPE_CHECKING:
    import torch

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Session, Step

WRAPPER = "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper"


def wrapper_call(
    backend: str,
    *,
    workspace: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
) -> Call:
    """The constructor. The layout is always NHD: HND pools are strided views of it, and strides are read."""
    return Call(
        f"{WRAPPER}.__init__",
        {
            "float_workspace_buffer": workspace,
            "kv_layout": "NHD",
            "use_cuda_graph": True,
            "qo_indptr_buf": qo_indptr,
            "paged_kv_indptr_buf": kv_indptr,
            "paged_kv_indices_buf": kv_indices,
            "paged_kv_last_page_len_buf": last_page_len,
            "backend": backend,
        },
    )


def plan_call(column: Column, step: Step, lists: PageLists, *, q_dtype: str) -> Call:
    """``plan``, with lengths and offsets on the host so that it need not fetch them."""
    import torch

    shape, dtypes = column.shape, column.dtypes
    qo_indptr = torch.arange(step.batch_size + 1, dtype=torch.int32) * step.q_len
    return Call(
        f"{WRAPPER}.plan",
        {
            "qo_indptr": qo_indptr,
            "paged_kv_indptr": lists.indptr,
            "paged_kv_indices": lists.indices,
            "paged_kv_last_page_len": lists.last_page_len,
            "num_qo_heads": shape.num_qo_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim_qk": shape.head_dim,
            "page_size": shape.page_size,
            "head_dim_vo": shape.head_dim_vo,
            "causal": True,
            "sm_scale": float(step.sm_scale),
            "window_left": shape.window_left,
            "logits_soft_cap": shape.soft_cap,
            "q_data_type": torch_dtype(q_dtype),
            "kv_data_type": torch_dtype(dtypes.kv),
            "o_data_type": torch_dtype(dtypes.out),
            "seq_lens": lists.seq_lens,
        },
    )


def run_call(column: Column, step: Step, query: torch.Tensor) -> Call:
    """``run``, less its output.

    A 16-bit query takes ``k_scale`` and ``v_scale`` (a v_scale other than 1 is one more kernel over the
    output); an e4m3 query takes three positional scales, query, K and V.
    """
    import torch

    kwargs: dict[str, Any] = {"q": query, "paged_kv_cache": (step.k, step.v)}
    if query.dtype == torch.float8_e4m3fn:
        args = (kwargs.pop("q"), kwargs.pop("paged_kv_cache"), 1.0, float(step.k_scale), float(step.v_scale))
        return Call(f"{WRAPPER}.run", kwargs, args)
    if column.dtypes.kv not in limits.SIXTEEN_BIT:
        kwargs["k_scale"] = float(step.k_scale)
        kwargs["v_scale"] = float(step.v_scale)
    if step.kv_block_scales is not None:
        kwargs["kv_cache_sf"] = step.kv_block_scales
    return Call(f"{WRAPPER}.run", kwargs)


class _Base(Installed):
    family = Family.CONTEXT
    capture = Capture.REPLAN
    needs = frozenset({Need.HOST_KV_LENS})
    deterministic = False
    version = 1


class Fa2(_Base):
    """FlashAttention 2 templates, compute capability 8.0 and later."""

    name = "fa2"

    def supports(self, column: Column, facts: Facts) -> str | None:
        """See ``Route.supports``."""
        return fa2_unsupported(column, facts)

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``."""
        return _Session(capacity, allocate, "fa2", capacity.column.dtypes.q)


class Fa3(_Base):
    """FlashAttention 3 templates, compute capability 9.0."""

    name = "fa3"

    def supports(self, column: Column, facts: Facts) -> str | None:
        """See ``Route.supports``."""
        shape, dtypes, kernel = column.shape, column.dtypes, "fa3"
        found = limits.capability(facts)
        if reason := limits.device(facts, (9,), kernel):
            return reason
        if found != (9, 0):
            return f"fa3 runs on compute capability 9.0, not {found}"
        if dtypes.q not in limits.SIXTEEN_BIT:
            return f"fa3 takes a bf16 or fp16 query (quantised here for fp8 KV), not {dtypes.q}"
        if dtypes.kv == limits.E4M3 and shape.head_dim == 64:
            return "fa3 has no fp8 kernel at head_dim 64"
        if dtypes.kv == limits.E4M3 and shape.soft_cap:
            return "fa3 with fp8 has no logits soft cap"
        if shape.sinks:
            return "fa3 ignores sinks without an error"
        if (shape.head_dim, shape.head_dim_vo) not in ((64, 64), (128, 128), (256, 256), (192, 128)):
            return (
                "fa3 has kernels for head dims 64, 128, 256 and 192/128, "
                f"not {shape.head_dim}/{shape.head_dim_vo}"
            )
        if dtypes.out not in limits.SIXTEEN_BIT:
            return f"fa3 writes bf16 or fp16, not {dtypes.out}"
        return limits.first(
            limits.kv_dtype(column, (*limits.SIXTEEN_BIT, limits.E4M3), kernel),
            limits.same_16_bit(column, kernel),
        )

    def arithmetic(self, column: Column, facts: Facts) -> Arithmetic:
        """See ``Arithmetic``."""
        return limits.FP8_ARITHMETIC if column.dtypes.kv == limits.E4M3 else Arithmetic()

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``."""
        dtypes = capacity.column.dtypes
        return _Session(capacity, allocate, "fa3", dtypes.kv if dtypes.kv == limits.E4M3 else dtypes.q)


def fa2_unsupported(column: Column, facts: Facts, kernel: str = "fa2") -> str | None:
    """The limits of the fa2 templates, which the decode wrapper runs too."""
    shape, dtypes = column.shape, column.dtypes
    if reason := limits.device(facts, range(8, 13), kernel):
        return reason
    if dtypes.q not in limits.SIXTEEN_BIT:
        return f"{kernel} takes a bf16 or fp16 query, not {dtypes.q}"
    if dtypes.out not in limits.SIXTEEN_BIT:
        return f"{kernel} writes bf16 or fp16, not {dtypes.out}"
    if shape.sinks:
        return f"{kernel} ignores sinks without an error"
    if dtypes.kv == limits.NVFP4 and (limits.capability(facts) or (0, 0))[0] == 10:
        return (
            f"{kernel} reads V's block scales in order; engines keep them interleaved there, for trtllm-gen"
        )
    wide = (64, 128, 256, 512) if dtypes.kv in limits.SIXTEEN_BIT else (64, 128, 256)
    return limits.first(
        limits.kv_dtype(column, (*limits.SIXTEEN_BIT, limits.E4M3, limits.NVFP4), kernel),
        limits.same_16_bit(column, kernel),
        limits.equal_head_dims(column, kernel),
        limits.head_dims(column, wide, kernel),
    )


class _Session(PlannedSession):
    def __init__(self, capacity: Capacity, allocate: Allocate, backend: str, q_dtype: str) -> None:
        super().__init__(capacity, allocate, torch_dtype(q_dtype))
        self._backend, self._q_dtype = backend, q_dtype

    def wrapper_call(self, batch: int) -> Call:
        return wrapper_call(
            self._backend,
            workspace=self._float_workspace,
            qo_indptr=self._qo_indptr[: batch + 1],
            kv_indptr=self._indptr[: batch + 1],
            kv_indices=self._indices,
            last_page_len=self._last_page_len[:batch],
        )

    def plan_call(self, step: Step, lists: PageLists) -> Call:
        return plan_call(self._capacity.column, step, lists, q_dtype=self._q_dtype)

    def run_call(self, step: Step, query: torch.Tensor) -> Call:
        return run_call(self._capacity.column, step, query)
