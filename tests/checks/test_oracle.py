"""The oracle against torch's own attention in fp64, and what its bound lets through and stops."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.arena.operands import Operands, QueryStride, Recipe, build, capacity_of
from autotune.arena.plain import PlainArena
from autotune.checks import oracle
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES, DTypes
from autotune.domain.shape import KvLayout, Shape
from autotune.routes.arithmetic import Arithmetic
from autotune.routes.base import Route
from autotune.routes.planted import Planted

FP64 = DTypes("fp64", "fp64", "fp64")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Column, Recipe]:
    """Small columns of every kind with a recipe."""
    kv_heads = draw(st.integers(1, 3))
    shape = Shape(
        num_qo_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 24])),
        page_size=draw(st.sampled_from([1, 3, 16])),
        kv_layout=draw(st.sampled_from(sorted(layout.value for layout in KvLayout))),
        window_left=draw(st.sampled_from([-1, 0, 1, 7, 500])),
    )
    q_len = draw(st.integers(1, 5))
    # shorter than q_len too: a padded row
    kv_lens = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    dtypes = draw(st.sampled_from([FP64, PROFILES["fp32"], PROFILES["bf16"]]))
    column = Column(shape, dtypes, q_len, len(kv_lens), 96)
    stride = draw(st.sampled_from(list(QueryStride)))
    return column, Recipe(tuple(kv_lens), seed=draw(st.integers(0, 1000)), query_stride=stride)


def by_torch(operands: Operands) -> torch.Tensor:
    """The same answer, token by token mask and ``scaled_dot_product_attention``."""
    column, step = operands.column, operands.step
    shape, q_len, page = column.shape, column.q_len, column.shape.page_size
    rows = []
    for request, kv_len in enumerate(operands.recipe.kv_lens):
        where = [(operands.pages[request][t // page], t % page) for t in range(kv_len)]
        k, v = (
            torch.stack([cache[p, s] for p, s in where], dim=1).double().repeat_interleave(shape.group, dim=0)
            for cache in (step.k, step.v)
        )
        mask = torch.zeros((q_len, kv_len), dtype=torch.bool)
        for i in range(q_len):
            own = max(0, kv_len - q_len + i)
            for t in range(kv_len):
                mask[i, t] = t <= own and (shape.window_left < 0 or t >= own - shape.window_left)
        q = step.q[request * q_len : (request + 1) * q_len].double().transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=step.sm_scale)
        rows.append(out.transpose(0, 1))
    return torch.cat(rows)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_reference_equals_torch_in_fp64(case: tuple[Column, Recipe]) -> None:
    column, recipe = case
    with PlainArena() as arena:
        operands = build(arena, column, recipe, "cpu")
        assert torch.allclose(oracle.reference(operands), by_torch(operands), rtol=1e-11, atol=1e-12)


def test_reference_applies_scales_and_soft_cap() -> None:
    column = Column(Shape(2, 1, 16, 4, soft_cap=5.0), FP64, 1, 1, 16)
    with PlainArena() as arena:
        operands = build(arena, column, Recipe((5,), seed=0), "cpu")
        operands.step.k_scale, operands.step.v_scale = 0.5, 3.0
        page, tail = operands.pages[0]
        k = torch.cat([operands.step.k[page], operands.step.k[tail][:1]])[:, 0]
        v = torch.cat([operands.step.v[page], operands.step.v[tail][:1]])[:, 0]
        logits = 5.0 * torch.tanh(operands.step.q[0] @ k.T * operands.step.sm_scale * 0.5 / 5.0)
        assert torch.allclose(oracle.reference(operands)[0], 3.0 * torch.softmax(logits, dim=-1) @ v)


@pytest.mark.parametrize("block", [2, 1000])
def test_a_sink_joins_the_sum_of_its_head_alone(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # two KV heads of two query heads, three queries: a sink at a wrong place among them shows
    column = Column(Shape(4, 2, 16, 4, sinks=True, window_left=6), FP64, 3, 2, 16)
    monkeypatch.setattr(oracle, "BLOCK_BYTES", {"cpu": block * 4 * 2 * 32 * 8})
    with PlainArena() as arena:
        operands = build(arena, column, Recipe((5, 13), seed=0), "cpu")
        sinks = operands.step.sinks
        assert sinks is not None and len(set(sinks.tolist())) == 4
        plain = by_torch(operands)
        ref = oracle.reference(operands)
        for request, kv_len in enumerate((5, 13)):
            ids = torch.tensor(operands.pages[request])
            k = operands.step.k[ids].flatten(0, 1)[:kv_len]
            for i in range(3):
                first, end = oracle.visible(kv_len, 3, i, 6)
                for head in range(4):
                    row = request * 3 + i
                    logits = k[first:end, head // 2] @ operands.step.q[row, head] * operands.step.sm_scale
                    total = torch.exp(logits).sum()
                    share = total / (total + torch.exp(sinks[head].double()))
                    assert 0.01 < share < 0.99
                    assert torch.allclose(ref[row, head], plain[row, head] * share)


def test_worst_names_the_row_and_head() -> None:
    ref = torch.ones((6, 4, 8), dtype=torch.float64)
    out = ref.clone()
    out[3, 2] *= 1.25
    out[5, 0] *= 1.125
    found = oracle.worst(out, ref)
    assert (found.row, found.head) == (3, 2)
    assert found.error == pytest.approx(0.25)


def test_worst_is_absolute_where_the_reference_is_zero() -> None:
    ref = torch.zeros((1, 1, 4), dtype=torch.float64)
    assert oracle.worst(torch.full_like(ref, 0.5), ref).error == pytest.approx(1.0)
    assert oracle.worst(ref, ref).error == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_worst_refuses_what_is_not_finite(value: float) -> None:
    ref = torch.ones((2, 1, 4), dtype=torch.float64)
    out = ref.clone()
    out[1, 0, 2] = value
    with pytest.raises(ValueError, match="non-finite"):
        oracle.worst(out, ref)


def test_worst_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="compare"):
        oracle.worst(torch.ones((1, 1, 4)), torch.ones((1, 2, 4)))


def errors_of(route: Route, column: Column, kv_len: int, seeds: range) -> list[float]:
    """Worst error of each seed's launch of one request."""
    found = []
    for seed in seeds:
        with PlainArena() as arena:
            recipe = Recipe((kv_len,), seed=seed)
            operands = build(arena, column, recipe, "cpu")
            session = route.open(
                capacity_of(column, recipe, "cpu"), lambda name, shape, dtype: torch.empty(shape, dtype=dtype)
            )
            session.prepare(operands.step)
            session.run(operands.out)
            found.append(oracle.worst(operands.out, oracle.reference(operands)).error)
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_len", [2, 64, 1024])
def test_bound_lies_between_a_good_kernel_and_a_mask_wrong_by_one(
    dtype: str, head_dim: int, kv_len: int
) -> None:
    column = Column(Shape(8, 1, head_dim, 16), PROFILES[dtype], 1, 1, 4096)
    bound = oracle.bound(column)
    assert max(errors_of(Planted("planted-clean"), column, kv_len, range(5))) < bound / 3
    assert min(errors_of(Planted("planted-mask-short"), column, kv_len, range(5))) > bound


def test_bound_covers_weights_rounded_to_bf16() -> None:
    """Flash kernels feed the second product with bf16 weights; 64 long rows of 8 heads stay inside."""
    column = Column(Shape(8, 1, 128, 16), PROFILES["bf16"], 1, 64, 512)
    with PlainArena() as arena:
        operands = build(arena, column, Recipe(tuple(range(8, 520, 8)), seed=3), "cpu")
        ref = oracle.reference(operands)
        out = torch.empty_like(operands.out)
        for row, kv_len in enumerate(operands.recipe.kv_lens):
            pages = operands.pages[row]
            k = operands.step.k[pages].flatten(0, 1)[:kv_len, 0].float()
            v = operands.step.v[pages].flatten(0, 1)[:kv_len, 0].float()
            logits = operands.step.q[row].float() @ k.T * operands.step.sm_scale
            weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
            total = weights.sum(dim=-1, keepdim=True)
            out[row] = (weights.bfloat16().float() @ v / total).bfloat16()
        error = oracle.worst(out, ref).error
    assert oracle.roundoff("bf16") / 2 < error < oracle.bound(column) / 2


def test_bound_widens_only_by_what_a_kernel_declares() -> None:
    column = Column(Shape(8, 1, 128, 16), PROFILES["bf16"], 1, 1, 4096)
    plain = oracle.bound(column)
    wider = oracle.bound(column, Arithmetic(logits="bf16"))
    spread = math.exp(6 / math.sqrt(128))
    assert wider - plain == pytest.approx(spread * math.sqrt(5) * (2.0**-8 - 2.0**-24))
    assert oracle.bound(column, Arithmetic(weights="e4m3")) > plain
    assert oracle.mean_bound(column) < plain


def test_a_quantised_cache_does_not_round_the_weights() -> None:
    shape = Shape(8, 1, 128, 16)
    fp8, bf16 = (Column(shape, PROFILES[name], 1, 1, 4096) for name in ("fp8", "bf16"))
    assert oracle.bound(fp8) == oracle.bound(bf16)


def test_no_bound_without_a_roundoff() -> None:
    column = Column(Shape(8, 1, 128, 16), DTypes("nvfp4", "nvfp4", "nvfp4"), 1, 1, 64)
    with pytest.raises(NotImplementedError, match="nvfp4"):
        oracle.bound(column)


def test_a_large_batch_takes_a_fraction_of_a_second() -> None:
    column = Column(Shape(8, 1, 128, 16), PROFILES["bf16"], 4, 16, 4096)
    with PlainArena() as arena:
        operands = build(arena, column, Recipe((4096,) * 16, seed=1), "cpu")
        oracle.reference(operands)
        start = time.process_time()
        oracle.reference(operands)
        assert time.process_time() - start < 0.5  # about 0.1 s on an idle core


@pytest.mark.parametrize("block_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("window_left", [-1, 5, 40])
def test_reference_is_the_same_in_blocks(
    block_bytes: int, window_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Column(Shape(4, 2, 16, 4, window_left=window_left), FP64, 3, 5, 96)
    with PlainArena() as arena:
        operands = build(arena, column, Recipe((96, 1, 30, 7, 31), seed=3), "cpu")
        monkeypatch.setitem(oracle.BLOCK_BYTES, "cpu", block_bytes)
        assert torch.allclose(oracle.reference(operands), by_torch(operands), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kv_len", [2, 8, 400])
def test_the_bound_of_a_quantised_query_and_weights_holds(kv_len: int) -> None:
    """Attention with q and P in e4m3, as XQA's Hopper fp8 kernel and fmha-v2 compute it."""
    column = Column(Shape(8, 1, 128, 16), PROFILES["fp8"], 1, 256, 512)
    generator = torch.Generator().manual_seed(kv_len)
    q, k, v = (
        torch.randn((256, n, 128), generator=generator, dtype=torch.float64) for n in (8, kv_len, kv_len)
    )
    e4m3 = torch.float8_e4m3fn
    k, v = k.to(e4m3).double(), v.to(e4m3).double()

    def attend(q: torch.Tensor, quantise: bool) -> torch.Tensor:
        logits = torch.matmul(q, k.transpose(1, 2)) / math.sqrt(128)
        weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        total = weights.sum(dim=-1, keepdim=True)
        return torch.matmul(weights.to(e4m3).double() if quantise else weights, v) / total

    found = oracle.worst(attend(q.to(e4m3).double(), True), attend(q, False)).error
    bound = oracle.bound(column, Arithmetic(query="e4m3", weights="e4m3"))
    plain = oracle.bound(column)
    assert 3 * plain < found < bound


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_cache_that_is_rounded_on_its_way_stays_inside_its_bound(head_dim: int) -> None:
    column = Column(Shape(4, 2, head_dim, 16), PROFILES["nvfp4"], 3, 3, 256)
    plain = Arithmetic()
    rounded = Arithmetic(cache="e4m3")
    assert oracle.bound(column, rounded) > 2 * oracle.bound(column, plain)
    worst = 0.0
    with PlainArena() as arena:
        for seed in range(4):
            operands = build(arena, column, Recipe((1, 60, 250), seed=seed), "cpu")
            ref = oracle.reference(operands)
            k, v = operands.caches
            for request, kv_len in enumerate((1, 60, 250)):
                ids = torch.tensor(operands.pages[request])
                keys, values = (
                    cache.pages(ids, torch.float64).flatten(0, 1)[:kv_len].to(torch.float8_e4m3fn).double()
                    for cache in (k, v)
                )
                for i in range(3):
                    _, end = oracle.visible(kv_len, 3, i, -1)
                    for head in range(4):
                        row = request * 3 + i
                        logits = keys[:end, head // 2] @ operands.step.q[row, head].double()
                        out = torch.softmax(logits * operands.step.sm_scale, dim=0) @ values[:end, head // 2]
                        error = float((out - ref[row, head]).norm() / ref[row, head].norm())
                        worst = max(worst, error)
    assert oracle.bound(column, plain) < worst < oracle.bound(column, rounded)
