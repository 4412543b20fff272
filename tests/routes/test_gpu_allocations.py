"""Which device memory a route uses beside its operands: all of it must be guarded, too."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from autotune.routes.registry import BUILT_IN

pytestmark = pytest.mark.gpu

CODE = """
import json, os, sys
import torch
from autotune.arena import cuda_allocator
cuda_allocator.install()
state = cuda_allocator.installed()
from autotune.arena.cuda_vmm import CudaVmmArena, address_space
from autotune.arena.operands import Recipe, build, capacity_of
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.hardware.collect import collect
from autotune.worker.jobs import child_route

name = sys.argv[1]
route = child_route(name)
column = Column(Shape(8, 1, 128, 64), PROFILES["bf16"], 4, 4, 4096)
facts = collect("cuda")
answer = {"unsupported": route.supports(column, facts)}

def held():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0] + state.physical_bytes + address_space().physical_bytes

if answer["unsupported"] is None:
    recipe = Recipe((5, 700, 64, 2000), seed=1)
    with CudaVmmArena() as arena:
        operands = build(arena, column, recipe, "cuda")
        allocate = lambda label, shape, dtype: arena.tensor(label, shape, dtype)
        with cuda_allocator.guarding():
            session = route.open(capacity_of(column, recipe, "cuda"), allocate)
            session.prepare(operands.step)
            session.run(operands.out)  # loads modules, which take memory of their own
        before, guarded = held(), state.guarded_total
        with cuda_allocator.guarding():
            for _ in range(3):
                session.prepare(operands.step)
                session.run(operands.out)
        answer["outside_bytes"] = before - held()
        answer["guarded_allocations"] = state.guarded_total - guarded
        answer["overwritten"] = arena.overwritten()
print(json.dumps(answer))
sys.stdout.flush()
os._exit(0)
"""


CUDA = [name for name, (_, device) in BUILT_IN.items() if device == "cuda"]


@pytest.mark.parametrize("name", ["planted-cuda-clean", *CUDA])
def test_every_device_allocation_of_a_launch_is_guarded(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, name], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer["unsupported"]:
        pytest.skip(answer["unsupported"])
    assert answer["outside_bytes"] == 0, answer
    assert answer["overwritten"] == []
