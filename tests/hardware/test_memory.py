"""Bytes of a cell's operands, checked against the tensors themselves."""

from __future__ import annotations

import pytest
import torch

from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.hardware.memory import GIB, RESERVED_BYTES, kv_pool_bytes, operand_bytes, too_large


def column(profile: str, batch_size: int = 3, page_size: int = 16, max_context: int = 4096) -> Column:
    return Column(Shape(8, 2, 128, page_size), PROFILES[profile], 4, batch_size, max_context)


@pytest.mark.parametrize(("profile", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("kv_len", [16, 17, 100])
def test_bytes_are_those_of_the_tensors(profile: str, dtype: torch.dtype, kv_len: int) -> None:
    wanted = column(profile)
    pages = 3 * -(-kv_len // 16)
    pool = torch.empty((2, pages, 16, 2, 128), dtype=dtype)
    q = torch.empty((12, 8, 128), dtype=dtype)
    table, lengths = torch.empty((3, 256), dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    assert kv_pool_bytes(wanted, kv_len) == pool.nbytes
    assert operand_bytes(wanted, kv_len) == pool.nbytes + 2 * q.nbytes + table.nbytes + lengths.nbytes
    assert operand_bytes(wanted, kv_len, pools=3) - operand_bytes(wanted, kv_len) == 2 * pool.nbytes


def test_quantised_pools() -> None:
    bf16 = kv_pool_bytes(column("bf16"), 64)
    assert kv_pool_bytes(column("fp8"), 64) * 2 == bf16
    # four bits an element and a byte for each 16 of them
    assert kv_pool_bytes(column("nvfp4"), 64) * 32 == bf16 * 9


def test_head_dims_may_differ() -> None:
    shape = Shape(8, 1, 192, 64, head_dim_vo=128)
    wanted = Column(shape, PROFILES["bf16"], 1, 1, 4096)
    assert kv_pool_bytes(wanted, 64) == 64 * (192 + 128) * 2


def test_too_large() -> None:
    # 256 requests of 128k tokens, 2 KV heads of 256, bf16: 64 GiB a pool
    wanted = Column(Shape(32, 2, 256, 64), PROFILES["bf16"], 1, 256, 131072)
    cell = Cell(wanted, 65537, 131072)
    assert kv_pool_bytes(wanted, 131072) == 64 * GIB
    assert not too_large(cell, 140)
    assert not too_large(cell, 140, pools=2)
    assert too_large(cell, 140, pools=3)
    assert too_large(cell, 64)
    assert not too_large(cell, 79)
    room = 79 * GIB - RESERVED_BYTES - operand_bytes(wanted, 131072)
    assert not too_large(cell, 79, workspace_bytes=room)
    assert too_large(cell, 79, workspace_bytes=room + 1)
