"""``xqa-decode``: XQA behind ``trtllm_batch_decode_with_kv_cache(backend="xqa")``.

One name covers two kernels on SM90: with e4m3 KV and head_dim <= 256 the Hopper fp8 kernel runs for q_len 1,
and for q_len x group > 32 without window and sinks; everything else runs the generic kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.routes.arithmetic import Arithmetic
from autotune.routes.base import Capture, Family, Need
from autotune.routes.flashinfer import limits
from autotune.routes.flashinfer.call import Call
from autotune.routes.flashinfer.installed import Installed
from autotune.routes.flashinfer.layout import hnd
from autotune.routes.flashinfer.masks import fill_causal_mask
from autotune.routes.flashinfer.metadata import WORKSPACE_BYTES, torch_dtype
from autotune.routes.flashinfer.scales import bmm_scales
from autotune.routes.flashinfer.session import FunctionSession

if TYPE_CHECKING:
    import torch

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Session, Step

TARGET = "flashinfer.decode:trtllm_batch_decode_with_kv_cache"
PAGES = (16, 32, 64, 128)
# The workspace's first 8 MiB hold semaphores, zero before first use and reset by the kernel afterwards.
SEMAPHORE_BYTES = 8 * 2**20
# q_len 1 keeps the group's queries of one KV head in 16 KiB of shared memory, two bytes an element.
PERSISTENT_QUERY_ELEMENTS = 8192


def hopper_fp8(column: Column, major: int) -> bool:
    """Whether the Hopper fp8 kernel runs this column rather than the generic one (flashinfer/xqa.py)."""
    shape = column.shape
    if major != 9 or column.dtypes.kv != limits.E4M3 or shape.head_dim > 256:
        return False
    if column.q_len == 1:
        return True
    return not shape.sinks and shape.window_left < 0 and column.q_len * shape.group > 32


def call(
    step: Step,
    query: torch.Tensor,
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    *,
    workspace: torch.Tensor,
    mask: torch.Tensor | None,
    window_left: int,
) -> Call:
    """The launch of one step, less its output.

    Args:
        query: contiguous [batch x q_len, num_qo_heads, head_dim]; XQA takes no query stride.
        table: int32 [batch, width] contiguous; XQA splits the KV by width x page_size, not by max_seq_len.
        mask: uint16 [batch, q_len, 2 x ceil(q_len / 32)] for q_len > 1, else None.
    """
    scales = bmm_scales(step)
    return Call(
        TARGET,
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
            "backend": "xqa",
            "q_len_per_req": step.q_len,
            "mask": mask,
        },
    )


class XqaDecode(Installed):
    """XQA on SM90, SM100 and SM12x."""

    name = "xqa-decode"
    family = Family.DECODE
    capture = Capture.FREE
    needs = frozenset({Need.UNIFORM_Q_LEN})
    deterministic = False
    version = 1

    def supports(self, column: Column, facts: Facts) -> str | None:
        """See ``Route.supports``."""
        shape, dtypes, kernel = column.shape, column.dtypes, "XQA"
        if reason := limits.device(facts, (9, 10, 12), kernel):
            return reason
        if dtypes.q not in limits.SIXTEEN_BIT:
            return f"XQA takes a bf16 or fp16 query, not {dtypes.q}"
        if dtypes.kv == limits.NVFP4:
            return "XQA takes NVFP4 KV on compute capability 12.x only, in a scale layout not made here"
        if dtypes.out != dtypes.q:
            return f"XQA writes the query's dtype {dtypes.q}, not {dtypes.out}"
        if shape.head_dim % 16 or not 16 <= shape.head_dim <= 512:
            return f"XQA needs head_dim a multiple of 16 from 16 to 512, not {shape.head_dim}"
        if shape.head_dim > 256 and column.q_len > 1:
            return f"XQA takes head_dim {shape.head_dim} with q_len 1 only, not {column.q_len}"
        if column.q_len == 1 and shape.group * shape.head_dim > PERSISTENT_QUERY_ELEMENTS:
            most = PERSISTENT_QUERY_ELEMENTS // shape.head_dim
            return (
                f"XQA takes at most {most} query heads a KV head at head_dim {shape.head_dim}, "
                f"not {shape.group}"
            )
        return limits.first(
            limits.kv_dtype(column, (*limits.SIXTEEN_BIT, limits.E4M3), kernel),
            limits.same_16_bit(column, kernel),
            limits.equal_head_dims(column, kernel),
            limits.pages(column, PAGES, kernel),
            limits.no_soft_cap(column, kernel),
        )

    def arithmetic(self, column: Column, facts: Facts) -> Arithmetic:
        """The Hopper fp8 kernel quantises the query and the softmax's result."""
        found = limits.capability(facts)
        fp8 = found is not None and hopper_fp8(column, found[0])
        return limits.FP8_ARITHMETIC if fp8 else Arithmetic()

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``."""
        return _Session(capacity, allocate)


class _Session(FunctionSession):
    target = TARGET

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        import torch

        column = capacity.column
        super().__init__(capacity, allocate, torch_dtype(column.dtypes.q))
        self._workspace = allocate("workspace", (WORKSPACE_BYTES,), torch.uint8)
        self._workspace[:SEMAPHORE_BYTES].zero_()
        self._mask: torch.Tensor | None = None
        if column.q_len > 1:
            shape = (capacity.max_batch_size, column.q_len, 2 * -(-column.q_len // 32))
            self._mask = allocate("mask", shape, torch.uint16)
            fill_causal_mask(self._mask)

    def build(self, step: Step, query: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> Call:
        return call(
            step,
            query,
            seq_lens,
            table,
            workspace=self._workspace,
            mask=None if self._mask is None else self._mask[: step.batch_size],
            window_left=self._capacity.column.shape.window_left,
        )
