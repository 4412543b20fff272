"""Operands: the host's stream, the accelerator's pages (run here on the CPU), scales, empty rows, twins."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from autotune.arena import contents, operands
from autotune.arena.operands import (
    HOSTILE_K,
    HOSTILE_V,
    Operands,
    PageOrder,
    QueryStride,
    Recipe,
    Values,
    build,
    position_code,
    twin,
)
from autotune.arena.plain import PlainArena
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES, DTypes
from autotune.domain.shape import Shape

LENS = (33, 1, 150, 16)
LAYOUTS = ("fused-nhd", "fused-hnd", "interleaved-nhd", "separate-hnd", "packed-nhd", "packed-hnd")


def column(profile: str = "bf16", layout: str = "fused-nhd", window: int = -1) -> Column:
    return Column(Shape(4, 2, 32, 16, kv_layout=layout, window_left=window), PROFILES[profile], 3, 4, 200)


@pytest.fixture(params=["host", "pages"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of filling, on CPU tensors; chunks of 3 pages, so that rows straddle them."""
    monkeypatch.setattr(operands, "_one_stream", lambda device: request.param == "host")
    monkeypatch.setattr(contents, "CHUNK_ELEMENTS", 3 * 16 * 2 * 32)
    return str(request.param)


def made(case: Column, recipe: Recipe) -> Operands:
    with PlainArena("cpu") as arena:
        return build(arena, case, recipe, "cpu")


def rows(made: Operands, scale: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each row's tokens hold in the pool, fp32, read through the page table."""
    step, page = made.step, made.column.shape.page_size
    found = []
    for row, kv_len in enumerate(step.seq_lens.tolist()):
        ids = step.page_table[row, : -(-kv_len // page)].long()
        found.append(tuple(pool[ids].flatten(0, 1)[:kv_len].float() for pool in (step.k, step.v)))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", list(PageOrder))
def test_live_slots_hold_the_drawn_values_and_all_others_are_hostile(
    by: str, layout: str, order: PageOrder
) -> None:
    recipe = Recipe(LENS, 5, order=order, table_garbage=-7)
    got = made(column(layout=layout), recipe)
    for (k, v), (raw_k, raw_v) in zip(rows(got), got.unquantised(), strict=True):
        assert torch.equal(k, raw_k.bfloat16().float())
        assert torch.equal(v, raw_v.bfloat16().float())
    live = sum(LENS) * 2 * 32
    assert int((got.step.k == HOSTILE_K).sum()) == got.step.k.numel() - live
    assert int((got.step.v == HOSTILE_V).sum()) == got.step.v.numel() - live
    for row, ids in enumerate(got.pages):
        assert got.step.page_table[row].tolist() == ids + [-7] * (13 - len(ids))
    assert len({page for ids in got.pages for page in ids}) == 3 + 1 + 10 + 1


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(by: str) -> None:
    first, again, other = (made(column(), Recipe(LENS, seed)) for seed in (5, 5, 6))
    for name in ("q", "k", "v", "page_table"):
        assert torch.equal(getattr(first.step, name), getattr(again.step, name))
        assert not torch.equal(getattr(first.step, name), getattr(other.step, name))


def test_random_values_are_standard_normal_and_rows_differ(by: str) -> None:
    got = made(column("fp32"), Recipe(LENS, 5))
    for part in zip(*got.unquantised(), strict=True):
        flat = torch.cat([p.flatten() for p in part])
        assert abs(float(flat.mean())) < 0.05
        assert abs(float(flat.std()) - 1.0) < 0.05
        tokens = torch.cat([p.flatten(1) for p in part])
        assert len(torch.unique(tokens, dim=0)) == len(tokens)
    assert abs(float(got.step.q.std()) - 1.0) < 0.1


@pytest.mark.parametrize("window", [-1, 20])
def test_one_hot_queries_lie_along_their_targets_key(by: str, window: int) -> None:
    got = made(column("fp8", window=window), Recipe(LENS, 5, values=Values.POSITION_ONE_HOT))
    assert got.targets is not None
    stored = rows(got)
    for row, kv_len in enumerate(LENS):
        for i in range(3):
            first, end = contents.visible_span(kv_len, 3, i, window)
            pick = int(got.targets[row, i])
            assert first <= pick < end
            if (row + i) % 2 == 0:
                assert pick == end - 1
            wanted = stored[row][0][pick].repeat_interleave(2, dim=0) * 8
            assert torch.equal(got.step.q[row * 3 + i].float(), wanted)
        assert set(stored[row][0].flatten().tolist()) <= {-1.0, 1.0}


def test_position_codes_are_one_per_row_token_and_head(by: str) -> None:
    got = made(column("fp8"), Recipe(LENS, 5, values=Values.POSITION_UNIFORM))
    assert not got.step.q.any()
    for row, (_, v) in enumerate(rows(got)):
        code = position_code(row, torch.arange(LENS[row]), 32)
        assert torch.equal(v[:, 0], code)
        assert torch.equal(v[:, 1], code.roll(1, dims=1))


def test_fill_dead_false_touches_live_pages_only(by: str) -> None:
    with PlainArena("cpu") as arena:
        recipe = Recipe(LENS, 5, order=PageOrder.FAR_END, pool_pages=400, fill_dead=False)
        zeroed = arena.tensor
        arena.tensor = lambda *a, **k: zeroed(*a, **k).zero_()  # type: ignore[method-assign]
        got = build(arena, column(), recipe, "cpu")
    assert not got.step.k[:385].any()
    live = got.step.k[385:]
    assert int((live == HOSTILE_K).sum()) == live.numel() - sum(LENS) * 2 * 32


def test_scales_divide_what_is_stored(by: str) -> None:
    got = made(column("fp8"), Recipe(LENS, 5, k_scale=0.03, v_scale=2.5))
    assert (got.step.k_scale, got.step.v_scale) == (0.03, 2.5)
    for (k, v), (raw_k, raw_v) in zip(rows(got), got.unquantised(), strict=True):
        # e4m3 keeps 4 significant bits down to 2^-6, multiples of 2^-9 below
        assert torch.all((k * 0.03 - raw_k).abs() <= raw_k.abs() / 16 + 0.03 * 2**-10 + 1e-6)
        assert torch.all((v * 2.5 - raw_v).abs() <= raw_v.abs() / 16 + 2.5 * 2**-10 + 1e-6)
    assert torch.isfinite(got.step.k.float()).all()
    assert float(got.step.k.float().max()) == 448.0  # hostile values saturate, and stay hostile


def test_empty_rows_only_where_the_recipe_says_so(by: str) -> None:
    cases: list[tuple[int, ...]] = [(33, 0, 150, 0), (0, 0, 0, 0)]
    for kv_lens in cases:
        with pytest.raises(ValueError, match=r"must lie in 1\.\.200"):
            made(column(), Recipe(kv_lens, 5))
        for kind in Values:
            got = made(column(), Recipe(kv_lens, 5, values=kind, empty_rows=True, table_garbage=-1))
            assert got.step.seq_lens.tolist() == list(kv_lens)
            assert set(got.step.page_table[1].tolist()) == {-1}
            assert [len(k) for k, _ in got.unquantised()] == list(kv_lens)
            if kind is not Values.RANDOM:
                assert not got.step.q[3:6].any()
            if got.targets is not None:
                assert got.targets[1].tolist() == [-1, -1, -1]
                assert kv_lens[0] == 0 or got.step.q[:3].any()


def test_a_twin_is_equal_and_elsewhere_but_for_the_metadata(by: str) -> None:
    for stride in QueryStride:
        with PlainArena("cpu") as arena:
            one = build(arena, column(layout="interleaved-hnd"), Recipe(LENS, 5, query_stride=stride), "cpu")
            two = twin(arena, one)
        for name in ("q", "k", "v"):
            mine, theirs = getattr(two.step, name), getattr(one.step, name)
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()
            assert mine.stride() == theirs.stride()
        assert two.step.page_table is one.step.page_table
        assert two.step.seq_lens is one.step.seq_lens
        assert two.out.data_ptr() != one.out.data_ptr()


def test_what_cannot_be_made_is_one_clear_line() -> None:
    with pytest.raises(NotImplementedError, match="operands of q nvfp4 and KV bf16 are not made"):
        made(replace(column(), dtypes=DTypes("nvfp4", "bf16", "bf16")), Recipe(LENS, 5))
    with pytest.raises(ValueError, match="a bf16 KV cache has no block scales to interleave"):
        made(column(), Recipe(LENS, 5, interleaved_v_scales=True))
    with pytest.raises(ValueError, match="a head_dim that 64 divides, not 16 and 32"):
        made(replace(column(), dtypes=PROFILES["nvfp4"]), Recipe(LENS, 5, interleaved_v_scales=True))
    with pytest.raises(ValueError, match="a bf16 KV cache has no scales"):
        made(column(), Recipe(LENS, 5, k_scale=0.5))
    with pytest.raises(ValueError, match="must be positive"):
        made(column("fp8"), Recipe(LENS, 5, v_scale=0.0))
    with pytest.raises(ValueError, match="do not fit into a pool of 3"):
        made(column(), Recipe(LENS, 5, pool_pages=3))


def test_targets_are_spread_over_what_is_visible() -> None:
    drawn = contents.draw_targets(
        replace(column(), max_context=1000), (1000,) * 400, torch.Generator().manual_seed(1)
    )
    odd = drawn[1::2, 0]
    assert int(odd.min()) < 50
    assert int(odd.max()) > 940
    assert int(odd.max()) < 998
    assert all(a != b for a, b in pairwise(odd[:5].tolist()))


@pytest.mark.parametrize(("window", "seen"), [(-1, 998), (7, 8)])
def test_a_sink_is_of_the_size_of_what_a_row_sees(window: int, seen: int) -> None:
    shape = Shape(4, 2, 32, 16, sinks=True, window_left=window)
    case = Column(shape, PROFILES["bf16"], 3, 2, 2000)
    for seed in range(20):
        operands = made(case, Recipe((1000, 2000), seed=seed))
        assert operands.step.sinks is not None
        assert float((operands.step.sinks - math.log(seen)).abs().max()) < 5.0
    assert made(column(), Recipe(LENS, seed=1)).step.sinks is None


def test_a_twin_of_an_nvfp4_cache_has_block_scales_of_its_own() -> None:
    shape = Shape(4, 2, 64, 16, sinks=True)
    case = Column(shape, PROFILES["nvfp4"], 3, 4, 200)
    with PlainArena("cpu") as arena:
        one = build(arena, case, Recipe(LENS, 5), "cpu")
        two = twin(arena, one)
        for cache, other in zip(one.caches, two.caches, strict=True):
            ids = torch.arange(cache.data.shape[0])
            assert torch.equal(cache.pages(ids, torch.float64), other.pages(ids, torch.float64))
            for mine, theirs in zip(cache.tensors, other.tensors, strict=True):
                assert mine.data_ptr() != theirs.data_ptr()
        assert two.step.sinks is one.step.sinks
