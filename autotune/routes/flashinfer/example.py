"""A smallest step of a column on the CPU: enough for the library's Python layer, not for numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autotune.domain.shape import KvLayout
from autotune.routes.base import Step
from autotune.routes.flashinfer.metadata import torch_dtype

if TYPE_CHECKING:
    from autotune.domain.cell import Column


def _pool(
    column: Column, pages: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, layout = column.shape, KvLayout(column.shape.kv_layout)
    swap = layout.value.endswith("hnd")
    inner = (shape.num_kv_heads, shape.page_size) if swap else (shape.page_size, shape.num_kv_heads)
    if layout in (KvLayout.SEPARATE_NHD, KvLayout.SEPARATE_HND):
        k, v = (torch.zeros((pages, *inner, dim), dtype=dtype) for dim in dims)
    elif layout in (KvLayout.FUSED_NHD, KvLayout.FUSED_HND):
        k, v = torch.zeros((2, pages, *inner, dims[0]), dtype=dtype).unbind(0)
    elif layout.packed:
        rows = torch.zeros((pages, *inner, 2 * dims[0]), dtype=dtype)
        k, v = rows[..., : dims[0]], rows[..., dims[0] :]
    else:
        k, v = torch.zeros((pages, 2, *inner, dims[0]), dtype=dtype).unbind(1)
    return (k.transpose(1, 2), v.transpose(1, 2)) if swap else (k, v)


def example_step(column: Column, kv_lens: tuple[int, ...]) -> tuple[Step, torch.Tensor]:
    """A step of ``kv_lens`` with zeros in it, and its output tensor.

    The pool holds each row's pages in order, twice as many as are live.
    """
    shape, dtypes, batch = column.shape, column.dtypes, len(kv_lens)
    live = -(-max(kv_lens) // shape.page_size)
    pages = 2 * batch * live
    packed = 2 if dtypes.kv == "nvfp4" else 1
    dims = (shape.head_dim // packed, shape.head_dim_vo // packed)
    k, v = _pool(column, pages, dims, torch_dtype(dtypes.kv))
    table = torch.zeros((batch, column.table_width), dtype=torch.int32)
    table[:, :live] = torch.arange(batch * live, dtype=torch.int32).view(batch, live)
    block_scales = None
    if dtypes.kv == "nvfp4":
        scale_dims = (shape.head_dim // 16, shape.head_dim_vo // 16)
        block_scales = _pool(column, pages, scale_dims, torch.float8_e4m3fn)
    rows = batch * column.q_len
    step = Step(
        q=torch.zeros((rows, shape.num_qo_heads, shape.head_dim), dtype=torch_dtype(dtypes.q)),
        k=k,
        v=v,
        page_table=table,
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        host_kv_lens=kv_lens,
        q_len=column.q_len,
        sm_scale=shape.head_dim**-0.5,
        k_scale=1.0,
        v_scale=1.0,
        max_seq_len=column.max_context,
        sinks=torch.zeros(shape.num_qo_heads) if shape.sinks else None,
        kv_block_scales=block_scales,
    )
    return step, torch.zeros((rows, shape.num_qo_heads, shape.head_dim_vo), dtype=torch_dtype(dtypes.out))
