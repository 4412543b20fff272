from __future__ import annotations

import ctypes

import pytest
import torch

from autotune.arena.base import Placement
from autotune.worker.padding import open_padded


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("count", [1000, 4096, 4096 * 3 - 4])
def test_padding_lies_behind_the_operand_and_is_watched(placement: Placement, count: int) -> None:
    with open_padded("host_mmap", "cpu", placement, 512) as arena:
        assert arena.slack == 512
        assert arena.placement is placement
        tensor = arena.tensor("q", (2, count // 2), torch.uint8)
        assert tensor.shape == (2, count // 2)
        tensor.fill_(7)
        assert arena.overwritten() == []
        last = ctypes.c_ubyte.from_address(tensor.data_ptr() + count + 511)
        last.value ^= 0xFF
        assert arena.overwritten() == ["q: 1 bytes after the end, from offset 511"]
        last.value ^= 0xFF
        assert arena.overwritten() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.float8_e4m3fn])
def test_any_dtype_and_no_elements(dtype: torch.dtype) -> None:
    with open_padded("host_mmap", "cpu", Placement.HEAD, 512) as arena:
        assert arena.tensor("k", (3, 5), dtype).dtype is dtype
        assert arena.tensor("none", (0, 4), dtype).shape == (0, 4)
        assert arena.overwritten() == []


def test_without_padding_it_is_the_arena_itself() -> None:
    with open_padded("plain", "cpu", Placement.HEAD, 0) as arena:
        assert (arena.kind, arena.slack) == ("plain", 0)
