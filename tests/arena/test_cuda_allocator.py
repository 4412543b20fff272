"""The guarded torch allocator: its books on any machine, its guards on a GPU in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autotune.arena import cuda_allocator

PREFIX = """
import os, sys, torch
from autotune.arena import cuda_allocator
cuda_allocator.install()
state = cuda_allocator.installed()
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"{PREFIX}{code}\nsys.stdout.flush(); os._exit(0)"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_it_its_contexts_do_nothing() -> None:
    assert cuda_allocator.installed() is None
    with cuda_allocator.guarding(), cuda_allocator.holding():
        assert cuda_allocator.installed() is None


@pytest.mark.gpu
def test_torch_computes_with_it() -> None:
    output = run("""
x = torch.randn(257, 129, device="cuda")
for _ in range(50):
    y = (x @ x.T).softmax(-1)
torch.cuda.synchronize()
print(bool(torch.allclose(y.sum(-1), torch.ones(257, device="cuda"))), state.guarded_total)
state.collect()  # what the loop above freed is in the books until the next call
before = len(state.live)
with cuda_allocator.guarding():
    z = torch.empty(1000, dtype=torch.uint8, device="cuda")
block = state.live[z.data_ptr()]
print(state.guarded_total, block.mapping is not None, (z.data_ptr() + 1024) % (2 << 20))
del z
state.collect()
print(len(state.live) == before)
""")
    assert output.splitlines() == ["True 0", "1 True 0", "True"]


@pytest.mark.gpu
def test_an_overrun_of_a_guarded_block_faults() -> None:
    output = run("""
from autotune.arena.cuda_vmm import bytes_at
with cuda_allocator.guarding():
    z = torch.zeros(1024, dtype=torch.uint8, device="cuda")
print(int(bytes_at(z.data_ptr(), 1024).sum()))
try:
    print(int(bytes_at(z.data_ptr(), 1025).to(torch.int32).sum()))
    torch.cuda.synchronize()
    print("no fault")
except Exception as error:
    print(error)
""")
    assert output.startswith("0\n") and "illegal memory access" in output


@pytest.mark.gpu
def test_a_graph_keeps_its_blocks() -> None:
    output = run("""
x = torch.ones(1000, device="cuda")
out = torch.empty(1000, device="cuda")
def work():
    a = x * 2
    b = a + 1
    out.copy_(b * a)
work()
torch.cuda.synchronize()
with cuda_allocator.holding():
    graph = torch.cuda.CUDAGraph()
    with cuda_allocator.guarding(), torch.cuda.graph(graph, capture_error_mode="relaxed"):
        work()
    x.fill_(3)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    print(float(out.sum()), state.guarded_total > 0)
    graph.reset()
print(sum(block.mapping is not None for block in state.live.values()))
""")
    assert output.splitlines()[0] == "42000.0 True"
