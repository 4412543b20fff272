"""The planted CUDA routes as routes: by name, picklable, without Triton until one is opened."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.checks.controls import CUDA, CUDA_CONTROLS
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.routes import planted_cuda
from autotune.routes.base import Route
from autotune.routes.planted_cuda import SESSIONS, CudaSession, Fault, PlantedCuda
from autotune.routes.planted_xqa import COLUMN, NAMES, PlantedXqa
from autotune.worker.jobs import child_route

KERNELS = Path(planted_cuda.__file__).with_name("planted_kernels.py")


def test_every_fault_is_a_control_and_the_other_way_round() -> None:
    known = {control.route.name for control in CUDA_CONTROLS}
    assert set(SESSIONS) | {"planted-xqa-narrow-table"} == known | {"planted-cuda-clean"}


@pytest.mark.parametrize("name", [*sorted(SESSIONS), *NAMES])
def test_a_fault_is_a_route_that_travels_by_name(name: str) -> None:
    route = child_route(name)
    assert isinstance(route, Route) and route.name == name
    assert pickle.loads(pickle.dumps(route)) == route
    assert isinstance(route, PlantedXqa if name in NAMES else PlantedCuda)


@pytest.mark.parametrize("route", [PlantedCuda, PlantedXqa])
def test_an_unknown_name_is_one_clear_line(route: type[PlantedCuda] | type[PlantedXqa]) -> None:
    with pytest.raises(ValueError, match="no planted route is called 'planted-nothing'"):
        route("planted-nothing")


def test_what_it_takes() -> None:
    route = PlantedCuda("planted-cuda-clean")
    cuda = Facts("cuda", {}, {})
    assert route.supports(CUDA.usual, cuda) is None
    assert route.supports(CUDA.usual, Facts("cpu", {}, {})) == "planted Triton kernels run on CUDA"
    odd = Column(Shape(4, 2, 96, 64), PROFILES["bf16"], 3, 3, 512)
    assert "power of two" in str(route.supports(odd, cuda))


def test_the_table_of_the_real_kernel_ends_flush() -> None:
    # XQA reads page id -1 as zeros: padding behind the table would hide that it is read too far
    assert COLUMN.batch_size * 4 % 16 == 0


def test_triton_is_imported_by_nobody_but_the_kernels() -> None:
    code = (
        "import sys\n"
        "import autotune.checks.controls, autotune.routes.planted_cuda, autotune.routes.planted_xqa\n"
        "bad = {'autotune.routes.planted_kernels', 'flashinfer'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_kernel_knows_every_fault_and_gets_every_argument() -> None:
    """Triton compiles on a GPU only; what can be seen without: names, order and number of arguments."""
    tree = ast.parse(KERNELS.read_text())
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith("_")
    }
    assert constants == {fault.name for fault in Fault} - {"NONE"}
    attend = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "attend")
    used = {node.id for node in ast.walk(attend) if isinstance(node, ast.Name)}
    assert constants <= used
    names = [argument.arg for argument in attend.args.args]

    import torch

    sent: list[tuple[object, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **kwargs: sent.append((*args, *kwargs))

    session = CudaSession.__new__(CudaSession)
    session.kernels = type("kernels", (), {"attend": Recorder()})
    session.shape = CUDA.usual.shape
    session.batch, session.factor, session.limit = 3, 1.0, 7
    session.lens = session.counter = session.sink = torch.zeros(3, dtype=torch.int32)
    session.table = torch.zeros((3, 8), dtype=torch.int32)
    from autotune.arena.operands import Recipe, build
    from autotune.arena.plain import PlainArena

    with PlainArena() as arena:
        operands = build(arena, CUDA.usual, Recipe((3, 70, 128), seed=0), "cpu")
        session.step = operands.step
        session.run(operands.out)
    (arguments,) = sent
    given = dict(zip(names, arguments, strict=True))
    shape, step = CUDA.usual.shape, operands.step
    assert given["limit"] == 7 and given["fault"] == 0 and given["group"] == shape.group
    assert given["page_size"] == shape.page_size and given["table_width"] == 8
    assert (given["k_page"], given["k_slot"], given["k_head"]) == step.k.stride()[:3]
    assert (given["q_row"], given["q_head"]) == step.q.stride()[:2]
    assert (given["DIM"], given["BLOCK"]) == ("DIM", "BLOCK")
