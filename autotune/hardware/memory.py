"""How many bytes a cell's operands take, and whether a device can hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.domain.dtypes import BITS, Dtype

if TYPE_CHECKING:
    from autotune.domain.cell import Cell, Column

GIB = 2**30

# One e4m3 scale for this many nvfp4 elements.
NVFP4_BLOCK = 16

# Left for the CUDA context, loaded modules and captured graphs.
RESERVED_BYTES = 2 * GIB


def _bytes(elements: int, dtype: str) -> int:
    size = -(-elements * BITS[Dtype(dtype)] // 8)
    return size + -(-elements // NVFP4_BLOCK) if dtype == Dtype.NVFP4.value else size


def kv_pool_bytes(column: Column, kv_len: int) -> int:
    """Bytes of one layer's KV pool, in whole pages, when each request holds ``kv_len`` tokens."""
    shape = column.shape
    pages = column.batch_size * -(-kv_len // shape.page_size)
    tokens = pages * shape.page_size * shape.num_kv_heads
    return _bytes(tokens * shape.head_dim, column.dtypes.kv) + _bytes(
        tokens * shape.head_dim_vo, column.dtypes.kv
    )


def operand_bytes(column: Column, kv_len: int, *, pools: int = 1) -> int:
    """Bytes of all operands of a launch: ``pools`` KV pools, q, out, page table and lengths."""
    shape = column.shape
    heads = column.rows * shape.num_qo_heads
    return (
        pools * kv_pool_bytes(column, kv_len)
        + _bytes(heads * shape.head_dim, column.dtypes.q)
        + _bytes(heads * shape.head_dim_vo, column.dtypes.out)
        + 4 * column.batch_size * (column.table_width + 1)
    )


def too_large(cell: Cell, memory_gib: int, *, pools: int = 1, workspace_bytes: int = 0) -> bool:
    """Whether a cell can never fit into a device of ``memory_gib`` GiB: the letter ``x`` of a table.

    Args:
        pools: KV pools that timing rotates through (two at least where one does not exceed twice the L2).
        workspace_bytes: the engine's attention workspace.
    """
    needed = operand_bytes(cell.column, cell.kv_high, pools=pools) + workspace_bytes + RESERVED_BYTES
    return needed > memory_gib * GIB
