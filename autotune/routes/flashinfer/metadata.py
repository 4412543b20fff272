"""Buffers that a session owns so that a captured graph finds every step at the same addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.routes.contract import ContractError

if TYPE_CHECKING:
    import torch

    from autotune.domain.cell import Column
    from autotune.routes.base import Allocate, Capacity, Step

# What SGLang allocates for this model family (its SGLANG_FLASHINFER_WORKSPACE_SIZE); FlashInfer's
# documentation asks for 128 MiB, too little for the fa2 plan of 32 query heads at head_dim 256.
WORKSPACE_BYTES = 512 * 2**20

_TORCH = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn", "nvfp4": "uint8"}


def torch_dtype(name: str) -> torch.dtype:
    """torch's type for the elements of ``name`` (two nvfp4 values share a byte); ``KeyError`` for others."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH[name])
    return dtype


def check_rows(column: Column, capacity: Capacity, step: Step) -> None:
    """Refuse a step that would make a kernel mis-stride: it derives the batch from rows // q_len.

    Raises:
        ContractError: rows are not batch x q_len, or the step is larger than the session.
    """
    if step.q_len != column.q_len:
        raise ContractError("rows", f"the session was opened for q_len {column.q_len}, not {step.q_len}")
    rows = step.batch_size * step.q_len
    if step.q.shape[0] != rows or step.page_table.shape[0] != step.batch_size:
        raise ContractError(
            "rows",
            f"q has {step.q.shape[0]} rows and the page table {step.page_table.shape[0]}, "
            f"not batch {step.batch_size} x q_len {step.q_len}",
        )
    if step.batch_size > capacity.max_batch_size:
        raise ContractError(
            "batch", f"a batch of {step.batch_size} exceeds the session's {capacity.max_batch_size}"
        )


class StepBuffers:
    """seq_lens and page table at fixed addresses, at capacity; a smaller batch uses their first rows.

    A table of another width than the engine's gets a buffer of its own (a graph captured before must be
    captured again): kernels read the row stride and, on XQA, the KV split from the width.
    """

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        import torch

        self._allocate = allocate
        self._rows = capacity.max_batch_size
        self._seq_lens = allocate("route_seq_lens", (self._rows,), torch.int32)
        self._table = allocate("route_page_table", (self._rows, capacity.column.table_width), torch.int32)

    def load(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the step's lengths and table in; returns (seq_lens [batch], table [batch, width])."""
        import torch

        batch, width = step.page_table.shape
        if width != self._table.shape[1]:
            self._table = self._allocate("route_page_table", (self._rows, width), torch.int32)
        seq_lens, table = self._seq_lens[:batch], self._table[:batch]
        seq_lens.copy_(step.seq_lens)
        table.copy_(step.page_table)
        return seq_lens, table


class Query:
    """The query as the kernel takes it: the step's own where possible, else a copy made inside ``run``.

    The kernels behind the functional calls get no query stride, and a quantised query is a kernel of its
    own: both copies belong to the launch and are captured and timed with it, as in an engine.
    """

    def __init__(
        self, capacity: Capacity, allocate: Allocate, dtype: torch.dtype, *, strided: bool = False
    ) -> None:
        self._dtype, self._strided = dtype, strided
        self._allocate, self._capacity = allocate, capacity
        self._buffer: torch.Tensor | None = None
        self._source: torch.Tensor | None = None
        self.tensor: torch.Tensor | None = None

    def load(self, step: Step) -> torch.Tensor:
        """Bind the step's query; returns the tensor that the kernel is given."""
        q = step.q
        if q.dtype == self._dtype and (self._strided or q.is_contiguous()):
            self._source, self.tensor = None, q
            return q
        if self._buffer is None:
            shape = self._capacity.column.shape
            rows = self._capacity.max_batch_size * self._capacity.column.q_len
            self._buffer = self._allocate("route_q", (rows, shape.num_qo_heads, shape.head_dim), self._dtype)
        self._source, self.tensor = q, self._buffer[: q.shape[0]]
        return self.tensor

    def run(self) -> None:
        """Make the copy, if one is needed. No saturation: an engine casts plainly."""
        if self._source is not None and self.tensor is not None:
            self.tensor.copy_(self._source)


def load_cumulative_kv(buffer: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """int32 [batch + 1] cumulative KV lengths in tokens, written into the head of ``buffer`` (its first
    element is zero already)."""
    import torch

    batch = seq_lens.shape[0]
    torch.cumsum(seq_lens, 0, dtype=torch.int32, out=buffer[1 : batch + 1])
    return buffer[: batch + 1]


def uniform_offsets(buffer: torch.Tensor, q_len: int) -> None:
    """Fill ``buffer`` with 0, q_len, 2 q_len, ...: the cumulative query lengths of a uniform batch."""
    import torch

    buffer.copy_(torch.arange(buffer.shape[0], dtype=torch.int32) * q_len)
