"""Both torch routes against an fp64 reference that reads the pool token by token."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.arena.base import Arena, Placement
from autotune.arena.host_mmap import HostMmapArena
from autotune.arena.operands import Operands, PageOrder, QueryStride, Recipe, Values, build, capacity_of
from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import KvLayout, Shape
from autotune.routes import torch_paged, torch_support
from autotune.routes.base import Allocate, Capacity, Route
from autotune.routes.contract import ContractError
from autotune.routes.torch_sdpa import TorchSdpa
from autotune.routes.torch_splitkv import TorchSplitKv

torch.set_num_threads(1)

ROUTES: list[Route] = [TorchSdpa(), TorchSplitKv()]
IDS = [route.name for route in ROUTES]
CPU = Facts("cpu", {}, {})
BOUND = {"fp32": 2e-5, "bf16": 2e-2}

routes = pytest.mark.parametrize("route", ROUTES, ids=IDS)


def column(shape: Shape, dtype: str = "fp32", q_len: int = 1, batch: int = 2, context: int = 512) -> Column:
    return Column(shape, DTypes(dtype, dtype, dtype), q_len, batch, context)


def guarded(arena: Arena) -> Allocate:
    return lambda name, shape, dtype: arena.tensor(name, shape, dtype)


def reference(operands: Operands) -> torch.Tensor:
    """[rows, heads, dim] in fp64, one query and head at a time, from the definition."""
    step, shape = operands.step, operands.column.shape
    out = torch.zeros(operands.out.shape, dtype=torch.float64)
    for row, (kv_len, pages) in enumerate(zip(operands.recipe.kv_lens, operands.pages, strict=True)):
        tokens = [(pages[t // shape.page_size], t % shape.page_size) for t in range(kv_len)]
        keys = torch.stack([step.k[page, slot] for page, slot in tokens]).double()
        values = torch.stack([step.v[page, slot] for page, slot in tokens]).double()
        for i in range(step.q_len):
            end = max(1, kv_len - step.q_len + i + 1)
            begin = max(0, end - 1 - shape.window_left) if shape.window_left >= 0 else 0
            for head in range(shape.num_qo_heads):
                kv = head // shape.group
                query = step.q[row * step.q_len + i, head].double()
                logits = keys[begin:end, kv] @ query * step.sm_scale * step.k_scale
                weights = torch.softmax(logits, 0)
                out[row * step.q_len + i, head] = weights @ values[begin:end, kv] * step.v_scale
    return out


def launch(route: Route, operands: Operands, arena: Arena, capacity: Capacity | None = None) -> torch.Tensor:
    session = route.open(capacity or capacity_of(operands.column, operands.recipe, "cpu"), guarded(arena))
    operands.out.fill_(math.nan)
    session.prepare(operands.step)
    session.run(operands.out)
    session.close()
    return operands.out.clone()


def agrees(route: Route, case: Column, recipe: Recipe, placement: Placement = Placement.TAIL) -> None:
    with HostMmapArena(placement) as arena:
        operands = build(arena, case, recipe, "cpu")
        found = launch(route, operands, arena)
        assert arena.overwritten() == []
        torch.testing.assert_close(
            found.double(),
            reference(operands),
            rtol=0,
            atol=BOUND[case.dtypes.q],
        )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Column, Recipe]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    page = draw(st.sampled_from([1, 4, 16]))
    shape = Shape(
        num_qo_heads=kv_heads * draw(st.sampled_from([1, 2, 5])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 64])),
        page_size=page,
        kv_layout=draw(st.sampled_from(KvLayout)).value,
        window_left=draw(st.sampled_from([-1, -1, 0, 3, 40])),
    )
    q_len = draw(st.integers(1, 6))
    context = draw(st.sampled_from([64, 150]))
    batch = draw(st.integers(1, 4))
    lens = draw(st.lists(st.integers(1, context), min_size=batch, max_size=batch))
    recipe = Recipe(
        tuple(lens),
        seed=draw(st.integers(0, 2**31)),
        order=draw(st.sampled_from(PageOrder)),
        query_stride=draw(st.sampled_from(QueryStride)),
        table_garbage=draw(st.sampled_from([-1, 2**31 - 1, 0])),
    )
    return column(shape, draw(st.sampled_from(["fp32", "bf16"])), q_len, batch, context), recipe


@routes
@given(case=cases(), placement=st.sampled_from(Placement))
@settings(max_examples=60, deadline=None)
def test_ragged_batches_of_any_layout(
    route: Route, case: tuple[Column, Recipe], placement: Placement
) -> None:
    agrees(route, *case, placement)


@routes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [-1, 900, 1500])
@pytest.mark.parametrize("layout", ["fused-nhd", "interleaved-hnd"])
def test_several_blocks(route: Route, dtype: str, window: int, layout: str) -> None:
    # 1,024 tokens are a block: one short of, at, one past one and two blocks, and a lone last token
    shape = Shape(4, 2, 32, 16, kv_layout=layout, window_left=window)
    lens = (1023, 1024, 1025, 2047, 2049, 2560, 3)
    agrees(route, column(shape, dtype, 3, 7, 2560), Recipe(lens, 1, table_garbage=-1))


@routes
def test_more_new_tokens_than_a_block_of_pages_holds(route: Route) -> None:
    shape = Shape(1, 1, 16, 1)
    agrees(route, column(shape, q_len=70, batch=2, context=200), Recipe((200, 65), 1, table_garbage=-1))


@routes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("values", [Values.POSITION_UNIFORM, Values.POSITION_ONE_HOT])
def test_exact_positions(route: Route, dtype: str, values: Values) -> None:
    shape = Shape(8, 2, 64, 16)
    agrees(route, column(shape, dtype, 4, 3), Recipe((33, 512, 4), 9, values=values))


@routes
@pytest.mark.parametrize("q_len", [2, 5])
def test_padded_rows_see_token_0_and_stay_finite(route: Route, q_len: int) -> None:
    shape = Shape(4, 2, 32, 16)
    for lens in ((1,) * 4, tuple(range(1, 5)), (1, 100, 1, 2)):
        agrees(route, column(shape, q_len=q_len, batch=4), Recipe(lens, 3, table_garbage=-1))


@routes
def test_a_row_without_tokens_gives_zeros_and_spares_its_neighbours(route: Route) -> None:
    with HostMmapArena() as arena:
        operands = build(arena, column(Shape(4, 2, 32, 16), batch=3), Recipe((20, 7, 40), 3), "cpu")
        wanted = reference(operands)
        wanted[1] = 0.0
        operands.step.seq_lens[1] = 0
        operands.step.host_kv_lens = (20, 0, 40)
        operands.step.page_table[1] = -1
        found = launch(route, operands, arena)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)


@routes
def test_lengths_are_read_from_the_tensor_if_the_host_has_none(route: Route) -> None:
    with HostMmapArena() as arena:
        operands = build(arena, column(Shape(4, 2, 32, 16), q_len=2), Recipe((33, 50), 3), "cpu")
        operands.step.host_kv_lens = None
        found = launch(route, operands, arena)
        torch.testing.assert_close(found.double(), reference(operands), rtol=0, atol=2e-5)


@routes
def test_a_batch_without_any_tokens_gives_zeros(route: Route) -> None:
    with HostMmapArena() as arena:
        operands = build(arena, column(Shape(4, 2, 32, 16)), Recipe((20, 7), 3), "cpu")
        operands.step.seq_lens.zero_()
        operands.step.host_kv_lens = (0, 0)
        operands.step.page_table.fill_(-1)
        assert launch(route, operands, arena).eq(0).all()


@routes
@pytest.mark.parametrize("layout", [layout.value for layout in KvLayout])
@pytest.mark.parametrize("window", [-1, 0, 20])
@pytest.mark.parametrize("lens", [(1, 17, 100), (5, 3, 16)])
def test_nan_in_dead_slots_and_pages_never_leaks(
    route: Route, layout: str, window: int, lens: tuple[int, ...]
) -> None:
    with HostMmapArena() as arena:
        case = column(Shape(4, 2, 32, 16, kv_layout=layout, window_left=window), q_len=2, batch=3)
        operands = build(arena, case, Recipe(lens, 5, table_garbage=2**31 - 1), "cpu")
        live = {
            (pages[t // 16], t % 16)
            for kv_len, pages in zip(operands.recipe.kv_lens, operands.pages, strict=True)
            for t in range(kv_len)
        }
        for page in range(operands.step.k.shape[0]):
            for slot in range(16):
                if (page, slot) not in live:
                    operands.step.k[page, slot] = math.nan
                    operands.step.v[page, slot] = math.nan
        found = launch(route, operands, arena)
        torch.testing.assert_close(found.double(), reference(operands), rtol=0, atol=2e-5)


@routes
def test_a_nan_request_stays_alone(route: Route) -> None:
    with HostMmapArena() as arena:
        operands = build(arena, column(Shape(4, 2, 32, 16), batch=3), Recipe((5, 60, 21), 5), "cpu")
        wanted = reference(operands)
        for page in operands.pages[1]:
            operands.step.k[page] = math.nan
            operands.step.v[page] = math.nan
        found = launch(route, operands, arena)
        assert found[1].isnan().all()
        torch.testing.assert_close(found[[0, 2]].double(), wanted[[0, 2]], rtol=0, atol=2e-5)


@routes
@pytest.mark.parametrize("query_heads", [1, 8])
def test_one_session_serves_smaller_and_changing_steps(route: Route, query_heads: int) -> None:
    case = column(Shape(query_heads, 1, 32, 16), q_len=4, batch=4, context=2100)
    with HostMmapArena() as arena:
        capacity = Capacity(case, 4, 600, "cpu")
        session = route.open(capacity, guarded(arena))
        for seed, lens in enumerate([(2100, 1500, 7, 900), (5,), (1, 2), (64, 2000, 1, 3), (1030, 1030)]):
            strides = list(QueryStride)[seed % 2]
            recipe = Recipe(lens, seed, pool_pages=600, query_stride=strides, table_garbage=-1)
            operands = build(arena, case, recipe, "cpu")
            operands.out.fill_(math.nan)
            session.prepare(operands.step)
            session.run(operands.out)
            torch.testing.assert_close(operands.out.double(), reference(operands), rtol=0, atol=2e-5)
        session.close()
        assert arena.overwritten() == []


@routes
def test_run_reads_the_pool_and_the_query_anew(route: Route) -> None:
    for stride in QueryStride:
        with HostMmapArena() as arena:
            case = column(Shape(8, 1, 32, 16), q_len=2)
            operands = build(arena, case, Recipe((40, 60), 5, query_stride=stride), "cpu")
            session = route.open(capacity_of(case, operands.recipe, "cpu"), guarded(arena))
            session.prepare(operands.step)
            session.run(operands.out)
            operands.step.k.neg_()
            operands.step.v.mul_(2.0)
            operands.step.q.add_(1.0)
            session.run(operands.out)
            torch.testing.assert_close(operands.out.double(), reference(operands), rtol=0, atol=2e-4)


@routes
def test_scales_are_applied(route: Route) -> None:
    with HostMmapArena() as arena:
        operands = build(arena, column(Shape(4, 2, 32, 16), q_len=2), Recipe((33, 50), 3), "cpu")
        operands.step.k_scale, operands.step.v_scale, operands.step.sm_scale = 0.5, 3.0, 0.3
        found = launch(route, operands, arena)
        torch.testing.assert_close(found.double(), reference(operands), rtol=0, atol=5e-5)


@routes
def test_strides_that_no_dense_rows_fit(route: Route) -> None:
    with HostMmapArena() as arena:
        operands = build(arena, column(Shape(4, 2, 32, 16), q_len=2), Recipe((33, 50), 3), "cpu")
        for name in ("k", "v"):
            cache = getattr(operands.step, name)
            pages, page, heads, dim = cache.shape
            padded = arena.tensor(f"{name}_cache", (pages, page + 1, heads + 1, dim + 2), torch.float32)
            setattr(operands.step, name, padded[:, :page, :heads, :dim].copy_(cache))
        found = launch(route, operands, arena)
        torch.testing.assert_close(found.double(), reference(operands), rtol=0, atol=2e-5)


@routes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_repeats_are_bitwise_equal_in_new_sessions_too(route: Route, dtype: str) -> None:
    assert route.deterministic
    case = column(Shape(8, 1, 128, 16), dtype, 4, 3, 2200)
    with HostMmapArena() as arena:
        operands = build(arena, case, Recipe((2200, 1000, 30), 3), "cpu")
        first = launch(route, operands, arena)
        for _ in range(5):
            assert torch.equal(launch(route, operands, arena), first)


def held(value: Any) -> list[torch.Tensor]:
    """Every tensor that ``value`` refers to."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in held(item)]
    if dataclasses.is_dataclass(value):
        return held([getattr(value, field.name) for field in dataclasses.fields(value)])
    return held(list(getattr(value, "__dict__", {}).values()))


@routes
@pytest.mark.parametrize("layout", ["fused-nhd", "fused-hnd"])
def test_every_buffer_comes_from_the_caller(route: Route, layout: str) -> None:
    taken: list[torch.Tensor] = []

    def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        taken.append(torch.empty(shape, dtype=dtype))
        return taken[-1]

    case = column(Shape(8, 2, 64, 16, kv_layout=layout), q_len=4, batch=4)
    with HostMmapArena() as arena:
        operands = build(arena, case, Recipe((500, 3, 40, 512), 1), "cpu")
        session = route.open(capacity_of(case, operands.recipe, "cpu"), allocate)
        session.prepare(operands.step)
        count = len(taken)
        session.run(operands.out)
        assert len(taken) == count
        step = operands.step
        known = {t.untyped_storage().data_ptr() for t in (*taken, step.q, step.k, step.v)}
        found = held(session)
        assert len(found) > 10
        for tensor in found:
            # what is left is numbers of dead slots, at most a page of them per row
            size = tensor.untyped_storage().nbytes()
            assert tensor.untyped_storage().data_ptr() in known or size <= 4 * 16 * 8 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": Shape(8, 1, 128, 16, soft_cap=30.0)}, "soft cap"),
        ({"shape": Shape(8, 1, 128, 16, sinks=True)}, "sinks"),
        ({"shape": Shape(8, 1, 192, 16, head_dim_vo=128)}, "192 and 128"),
        ({"dtypes": DTypes("fp16", "fp16", "fp16")}, "fp32 or bf16"),
        ({"dtypes": DTypes("bf16", "e4m3", "bf16")}, "kv e4m3"),
        ({"dtypes": DTypes("bf16", "bf16", "fp32")}, "out fp32"),
    ],
)
@routes
def test_what_it_cannot_do_it_says(route: Route, change: dict[str, Any], message: str) -> None:
    good = column(Shape(8, 1, 128, 16))
    assert route.supports(good, CPU) is None
    reason = route.supports(dataclasses.replace(good, **change), CPU)
    assert reason is not None and message in reason and "\n" not in reason


@routes
def test_a_gpu_is_refused(route: Route) -> None:
    case = column(Shape(8, 1, 128, 16))
    assert "not on cuda" in str(route.supports(case, Facts("cuda", {}, {})))
    with pytest.raises(ContractError, match="rule device"):
        route.open(Capacity(case, 1, 1, "cuda:0"), lambda name, shape, dtype: torch.empty(shape, dtype=dtype))


@routes
def test_it_satisfies_the_protocol(route: Route) -> None:
    assert isinstance(route, Route)


def test_the_dtypes_that_are_taken_are_those_that_can_be_computed() -> None:
    """Written twice: whoever asks what a route takes does not import torch."""
    assert torch_paged.DTYPES.keys() == torch_support.DTYPES
