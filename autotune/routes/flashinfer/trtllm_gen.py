"""``trtllm-gen-decode``, ``trtllm-gen-decode-ragged``, ``trtllm-gen-context``: precompiled kernels.

They exist for compute capability 10.0 and 10.3. That a shape has no kernel, or that its cubin is not here,
the library says at the first launch, as a Python exception: neither accuses a kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.routes.arithmetic import Arithmetic
from autotune.routes.base import Capture, Family, Need
from autotune.routes.contract import ContractError
from autotune.routes.flashinfer import limits
from autotune.routes.flashinfer.call import Call
from autotune.routes.flashinfer.installed import Installed
from autotune.routes.flashinfer.layout import canonical, hnd
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

DECODE = "flashinfer.decode:trtllm_batch_decode_with_kv_cache"
CONTEXT = "flashinfer.prefill:trtllm_batch_context_with_kv_cache"
HEAD_DIMS = (64, 128, 256, 512)
# csrc/trtllm_fmha_kernel_launcher.cu: no kernel for these parameters, the text goes on with them.
NO_KERNEL = "Missing TRTLLM-GEN kernel"
# trtllm/fmha/fmhaKernels.cuh: there is one, and its file could not be had.
NO_CUBIN = "Failed to load cubin"
# The counter buffer's size depends on the SM count only below this; the largest SM100/103 part has 160.
COUNTER_SMS = 256


def query_dtype(column: Column) -> str:
    """An 8- or 4-bit KV cache takes an e4m3 query: what SGLang and vLLM hand over; else the engine's own."""
    return limits.E4M3 if column.dtypes.kv in (limits.E4M3, limits.NVFP4) else column.dtypes.q


def counter_bytes(batch_size: int, num_qo_heads: int) -> int:
    """At least what ``get_trtllm_gen_multi_ctas_kv_counter_bytes`` asks for: 4 bytes a semaphore."""
    return 4 * (-(-max(batch_size * num_qo_heads, COUNTER_SMS) // 8) * 8)


def block_scales(step: Step) -> tuple[torch.Tensor, torch.Tensor] | None:
    """NVFP4 block scales in HND. Page and scale dimensions must be contiguous together, which an HND pool
    gives and a transposed NHD one with several heads does not."""
    if step.kv_block_scales is None:
        return None
    k, v = step.kv_block_scales
    return canonical(k.transpose(1, 2)), canonical(v.transpose(1, 2))


def decode_call(
    step: Step,
    query: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    *,
    workspace: torch.Tensor,
    counters: torch.Tensor,
    window_left: int,
    cum_seq_lens_q: torch.Tensor | None = None,
) -> Call:
    """One decode launch, less its output.

    ``max_seq_len`` is the engine's maximum context: it picks the kernel and the KV split, which a captured
    graph freezes.

    Args:
        counters: uint8, zero at allocation; the kernel resets it. Without it every launch allocates one.
        cum_seq_lens_q: int32 [batch + 1] makes the call ragged; None makes it uniform.
    """
    scales = bmm_scales(step)
    ragged = cum_seq_lens_q is not None
    return Call(
        DECODE,
        {
            "query": query,
            "kv_cache": (hnd(step.k), hnd(step.v)),
            "workspace_buffer": workspace,
            "block_tables": table,
            "seq_lens": seq_lens,
            "max_seq_len": step.max_seq_len,
            "bmm1_scale": scales.bmm1,
            "bmm2_scale": scales.bmm2,
            "window_left": window_left,
            "sinks": step.sinks,
            "kv_layout": "HND",
            "backend": "trtllm-gen",
            "q_len_per_req": None if ragged else step.q_len,
            "max_q_len": step.q_len if ragged else None,
            "cum_seq_lens_q": cum_seq_lens_q,
            "kv_cache_sf": block_scales(step),
            "multi_ctas_kv_counter_buffer": counters,
        },
    )


def context_call(
    step: Step,
    query: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    *,
    workspace: torch.Tensor,
    counters: torch.Tensor,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
) -> Call:
    """One context launch, less its output; ``cum_seq_lens_kv`` counts tokens, as SGLang passes it."""
    scales = bmm_scales(step)
    return Call(
        CONTEXT,
        {
            "query": query,
            "kv_cache": (hnd(step.k), hnd(step.v)),
            "workspace_buffer": workspace,
            "block_tables": table,
            "seq_lens": seq_lens,
            "max_q_len": step.q_len,
            "max_kv_len": step.max_seq_len,
            "bmm1_scale": scales.bmm1,
            "bmm2_scale": scales.bmm2,
            "batch_size": step.batch_size,
            "cum_seq_lens_q": cum_seq_lens_q,
            "cum_seq_lens_kv": cum_seq_lens_kv,
            "window_left": window_left,
            "kv_layout": "HND",
            "sinks": step.sinks,
            "kv_cache_sf": block_scales(step),
            "causal": True,
            "multi_ctas_kv_counter_buffer": counters,
        },
    )


def unsupported(column: Column, facts: Facts) -> str | None:
    """The limits that all three routes share."""
    shape, dtypes, kernel = column.shape, column.dtypes, "trtllm-gen"
    found = limits.capability(facts)
    if reason := limits.device(facts, (10,), kernel):
        return reason
    if found is not None and found not in ((10, 0), (10, 3)):
        return f"trtllm-gen is tested on compute capability 10.0 and 10.3, not {found[0]}.{found[1]}"
    if shape.page_size < 16 or shape.page_size & (shape.page_size - 1):
        return f"trtllm-gen needs pages of a power of two, 16 tokens or more, not {shape.page_size}"
    if dtypes.kv == limits.NVFP4 and not shape.kv_layout.endswith("hnd") and shape.num_kv_heads > 1:
        return "trtllm-gen copies an NVFP4 KV pool in NHD on every call; it needs an HND pool"
    if dtypes.kv == limits.NVFP4 and (shape.page_size % 4 or shape.head_dim_vo % 64):
        return (
            "interleaved V block scales need a page_size that 4 divides and a head_dim that 64 divides, "
            f"not {shape.page_size} and {shape.head_dim_vo}"
        )
    if dtypes.kv in limits.SIXTEEN_BIT and dtypes.q == limits.E4M3:
        return f"trtllm-gen needs KV of the query's dtype e4m3, not {dtypes.kv}"
    if dtypes.q not in (*limits.SIXTEEN_BIT, limits.E4M3):
        return f"trtllm-gen takes a query in bf16, fp16 or e4m3, not {dtypes.q}"
    fp8 = query_dtype(column) == limits.E4M3
    outs = (*limits.SIXTEEN_BIT, limits.E4M3) if fp8 else (*limits.SIXTEEN_BIT,)
    if dtypes.out not in outs:
        return f"trtllm-gen writes {', '.join(outs)} from a query in {query_dtype(column)}, not {dtypes.out}"
    return limits.first(
        limits.kv_dtype(column, (*limits.SIXTEEN_BIT, limits.E4M3, limits.NVFP4), kernel),
        limits.same_16_bit(column, kernel),
        limits.equal_head_dims(column, kernel),
        limits.head_dims(column, HEAD_DIMS, kernel),
        limits.no_soft_cap(column, kernel),
    )


class _Base(Installed):
    precompiled = True
    capture = Capture.FREE
    deterministic = False
    version = 1

    def arithmetic(self, column: Column, facts: Facts) -> Arithmetic:
        """See ``Arithmetic``."""
        if query_dtype(column) != limits.E4M3:
            return Arithmetic()
        if column.dtypes.kv != limits.NVFP4:
            return limits.FP8_ARITHMETIC
        # Both products take e4m3, which does not hold every code times its block's scale. A 16-bit output is
        # an e4m3 one widened afterwards: a rounding like that of a partial.
        narrow = limits.E4M3 if column.dtypes.out != limits.E4M3 else "fp32"
        return replace(limits.FP8_ARITHMETIC, cache=limits.E4M3, partials=narrow)

    def supports(self, column: Column, facts: Facts) -> str | None:
        """See ``Route.supports``."""
        return unsupported(column, facts)


class TrtllmGenDecode(_Base):
    """The decode kernel with one q_len for all requests."""

    name = "trtllm-gen-decode"
    family = Family.DECODE
    needs = frozenset({Need.UNIFORM_Q_LEN})

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``."""
        return _DecodeSession(capacity, allocate)


class TrtllmGenDecodeRagged(_Base):
    """The decode kernel with cumulative query lengths: requests may differ in q_len."""

    name = "trtllm-gen-decode-ragged"
    family = Family.DECODE
    needs: frozenset[Need] = frozenset()

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``."""
        return _RaggedSession(capacity, allocate)


class TrtllmGenContext(_Base):
    """The context kernel: a persistent scheduler without a KV split."""

    name = "trtllm-gen-context"
    family = Family.CONTEXT
    needs: frozenset[Need] = frozenset()

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``."""
        return _ContextSession(capacity, allocate)


class _Session(FunctionSession):
    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        import torch

        column = capacity.column
        super().__init__(capacity, allocate, torch_dtype(query_dtype(column)))
        shape = column.shape
        self._workspace = allocate("workspace", (WORKSPACE_BYTES,), torch.uint8)
        self._counters = allocate(
            "counters", (counter_bytes(capacity.max_batch_size, shape.num_qo_heads),), torch.uint8
        )
        self._counters.zero_()
        # With an NVFP4 cache only the e4m3 output is tested; a 16-bit one is converted inside the launch.
        self._narrow: torch.Tensor | None = None
        if column.dtypes.kv == limits.NVFP4 and column.dtypes.out != limits.E4M3:
            rows = capacity.max_batch_size * column.q_len
            self._narrow = allocate(
                "narrow_out", (rows, shape.num_qo_heads, shape.head_dim_vo), torch.float8_e4m3fn
            )

    def launch(self, call: Call, out: torch.Tensor) -> None:
        """See ``FunctionSession.launch``.

        Raises:
            ContractError: the library has no kernel for this call.
            ImportError: it has one that is not installed.
        """
        written = out if self._narrow is None else self._narrow[: out.shape[0]]
        try:
            super().launch(call, written)
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            if NO_KERNEL in said:
                raise ContractError("kernel", said) from error
            if NO_CUBIN in said:
                raise ImportError(f"a precompiled kernel is not here: {said}") from error
            raise
        if written is not out:
            out.copy_(written)


class _DecodeSession(_Session):
    target = DECODE

    def build(self, step: Step, query: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> Call:
        return decode_call(
            step,
            query,
            seq_lens,
            table,
            workspace=self._workspace,
            counters=self._counters,
            window_left=self._capacity.column.shape.window_left,
        )


class _RaggedSession(_Session):
    target = DECODE

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        import torch

        super().__init__(capacity, allocate)
        self._cum_q = allocate("cum_seq_lens_q", (capacity.max_batch_size + 1,), torch.int32)
        uniform_offsets(self._cum_q, capacity.column.q_len)

    def build(self, step: Step, query: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> Call:
        return decode_call(
            step,
            query,
            seq_lens,
            table,
            workspace=self._workspace,
            counters=self._counters,
            window_left=self._capacity.column.shape.window_left,
            cum_seq_lens_q=self._cum_q[: step.batch_size + 1],
        )


class _ContextSession(_Session):
    target = CONTEXT

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        import torch

        super().__init__(capacity, allocate)
        self._cum_q = allocate("cum_seq_lens_q", (capacity.max_batch_size + 1,), torch.int32)
        uniform_offsets(self._cum_q, capacity.column.q_len)
        self._cum_kv = allocate("cum_seq_lens_kv", (capacity.max_batch_size + 1,), torch.int32)
        self._cum_kv.zero_()

    def build(self, step: Step, query: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> Call:
        return context_call(
            step,
            query,
            seq_lens,
            table,
            workspace=self._workspace,
            counters=self._counters,
            window_left=self._capacity.column.shape.window_left,
            cum_seq_lens_q=self._cum_q[: step.batch_size + 1],
            cum_seq_lens_kv=load_cumulative_kv(self._cum_kv, seq_lens),
        )
