"""Guarded CUDA memory, on a GPU: what is mapped, what faults, what is watched."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autotune.arena.base import Placement
from autotune.arena.factory import open_arena

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SHAPE = (3, 5, 7)


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("slack", [0, 512])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn]
)
def test_a_tensor_is_usable_and_flush(placement: Placement, slack: int, dtype: torch.dtype) -> None:
    with open_arena("cuda_vmm", "cuda", placement, slack) as arena:
        tensor = arena.tensor("x", SHAPE, dtype)
        assert tensor.shape == SHAPE and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        # hostile before it is written
        assert int((tensor.view(torch.uint8) != 0xFF).sum()) == 0
        tensor.view(torch.uint8).fill_(1)
        nbytes = tensor.numel() * tensor.element_size()
        if placement is Placement.TAIL:
            assert (-(tensor.data_ptr() + nbytes)) % (2 * MIB) in range(slack, slack + 16)
        else:
            assert tensor.data_ptr() % (2 * MIB) in range(slack, slack + 16)
        assert arena.overwritten() == []


def test_two_operands_are_far_apart() -> None:
    with open_arena("cuda_vmm", "cuda") as arena:
        first, second = arena.tensor("a", (4,), torch.int32), arena.tensor("b", (4,), torch.int32)
        pool = arena.tensor("kv_cache", (4,), torch.int32)
        assert abs(first.data_ptr() - second.data_ptr()) > 1 << 32
        assert abs(first.data_ptr() - pool.data_ptr()) > 1 << 40


def test_writes_around_an_operand_are_found() -> None:
    from autotune.arena.cuda_vmm import bytes_at

    with open_arena("cuda_vmm", "cuda", Placement.TAIL, 512) as arena:
        out = arena.tensor("out", (64,), torch.float32)
        bytes_at(out.data_ptr() - 8, 8).zero_()
        assert arena.overwritten() == ["out: 8 bytes before the start, from offset -8"]
        bytes_at(out.data_ptr() + 256 + 4, 2).zero_()
        assert arena.overwritten()[1] == "out: 2 bytes after the end, from offset 4"


def test_many_arenas_come_and_go() -> None:
    from autotune.arena.cuda_vmm import address_space

    live = len(address_space().live)
    for round_ in range(60):
        with open_arena("cuda_vmm", "cuda") as arena:
            for index in range(20):
                arena.tensor(f"t{index}", (1000 + round_,), torch.uint8)
            arena.tensor("kv_cache", (round_ + 1, 4 * MIB), torch.uint8)
    assert len(address_space().live) == live


@pytest.mark.parametrize(
    ("placement", "where"), [("tail", "t.data_ptr(), n + 64"), ("head", "t.data_ptr() - 64, 128")]
)
def test_an_access_outside_faults(placement: str, where: str) -> None:
    # the first byte must be mapped for torch to take the address: in front of a head it is not
    code = f"""
import torch
from autotune.arena.base import Placement
from autotune.arena.factory import open_arena
from autotune.arena.cuda_vmm import bytes_at
arena = open_arena("cuda_vmm", "cuda", Placement("{placement}"))
t = arena.tensor("x", (4096,), torch.uint8)
n = 4096
t.fill_(1)
torch.cuda.synchronize()
print("mapped", flush=True)
try:
    print(int(bytes_at({where}).to(torch.int32).sum()))
    torch.cuda.synchronize()
    print("no fault")
except Exception as error:
    print(type(error).__name__, error)
import os
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.startswith("mapped"), done.stderr
    assert "no fault" not in done.stdout
    if placement == "tail":
        assert "illegal memory access" in done.stdout
