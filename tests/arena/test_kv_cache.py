"""What is written to a cache comes back, hostile and NaN places are where they should be, in every layout."""

from __future__ import annotations

import pytest
import torch

from autotune.arena.kv_cache import KvCache
from autotune.arena.operands import HOSTILE_K, Recipe, Values, build
from autotune.arena.plain import PlainArena
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import KvLayout, Shape

PAGES, PAGE, HEADS, DIM = 6, 8, 2, 64
STORED = ["bf16", "e4m3", "nvfp4", "nvfp4 interleaved"]


def cache(kind: str, hnd: bool, scale: float = 1.0) -> KvCache:
    inner = (HEADS, PAGE) if hnd else (PAGE, HEADS)

    def pool(dim: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros((PAGES, *inner, dim), dtype=dtype)
        return tensor.transpose(1, 2) if hnd else tensor

    if not kind.startswith("nvfp4"):
        return KvCache(
            pool(DIM, {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[kind]), scale, HOSTILE_K
        )
    return KvCache(
        pool(DIM // 2, torch.uint8),
        scale,
        HOSTILE_K,
        pool(DIM // 16, torch.float8_e4m3fn),
        kind.endswith("interleaved"),
    )


@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("kind", STORED)
def test_pages_and_tokens_are_two_ways_to_write_the_same(kind: str, hnd: bool) -> None:
    values = torch.randn((2, PAGE, HEADS, DIM), generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([4, 1])
    by_page, by_token = cache(kind, hnd), cache(kind, hnd)
    by_page.write_pages(ids, values, torch.zeros((2, PAGE), dtype=torch.bool), exact=False)
    flat = ids.repeat_interleave(PAGE)
    by_token.write_tokens(flat, torch.arange(2 * PAGE) % PAGE, values.flatten(0, 1), exact=False)
    for mine, theirs in zip(by_page.tensors, by_token.tensors, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    found = by_page.pages(ids, torch.float64)
    tolerance = {"bf16": 0.004, "e4m3": 0.06}.get(kind, 0.4)
    assert float((found - values).abs().max()) < tolerance * float(values.abs().max())
    assert torch.equal(by_page.tokens(flat, torch.arange(2 * PAGE) % PAGE).double(), found.flatten(0, 1))
    untouched = by_page.pages(torch.tensor([0, 2, 3, 5]), torch.float64)
    assert not untouched.any()


@pytest.mark.parametrize("kind", STORED)
def test_dead_slots_are_hostile_and_nan_goes_where_it_is_asked_for(kind: str) -> None:
    held = cache(kind, hnd=True, scale=1.0 if kind == "bf16" else 0.71)
    values = torch.randn((2, PAGE, HEADS, DIM), generator=torch.Generator().manual_seed(1))
    dead = torch.zeros((2, PAGE), dtype=torch.bool)
    dead[1, 5:] = True
    held.write_pages(torch.tensor([4, 1]), values, dead, exact=False)
    tail = held.pages(torch.tensor([1]), torch.float64)[0, 5:] * held.scale
    assert float((tail - HOSTILE_K).abs().max()) < 0.1 * HOSTILE_K
    assert float(held.pages(torch.tensor([1]), torch.float64)[0, :5].abs().max()) * held.scale < 8.0

    held.fill_nan(torch.tensor([0, 5]))
    held.fill_nan_after(torch.tensor([1, 4]), torch.tensor([5, 7]))
    nan = held.pages(torch.arange(PAGES), torch.float64).isnan()
    wanted = torch.zeros((PAGES, PAGE), dtype=torch.bool)
    wanted[0] = wanted[5] = True
    wanted[1, 5:] = wanted[4, 7:] = True
    assert torch.equal(nan, wanted[:, :, None, None].expand_as(nan))


@pytest.mark.parametrize("kind", STORED)
def test_reversing_changes_every_head_and_stays_with_its_token(kind: str) -> None:
    held = cache(kind, hnd=False)
    values = torch.randn((1, PAGE, HEADS, DIM), generator=torch.Generator().manual_seed(1))
    held.write_pages(torch.tensor([3]), values, torch.zeros((1, PAGE), dtype=torch.bool), exact=False)
    before = held.pages(torch.tensor([3]), torch.float64)
    held.reverse(torch.tensor([3]))
    after = held.pages(torch.tensor([3]), torch.float64)
    assert bool((before != after).any(dim=-1).all())
    # packed codes turn around by pairs
    turned = before.flip(-1)
    if kind.startswith("nvfp4"):
        turned = turned.view(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
    assert torch.equal(after, turned)


@pytest.mark.parametrize("layout", [KvLayout.PACKED_NHD, KvLayout.PACKED_HND])
def test_nvfp4_in_a_packed_pool_is_refused(layout: KvLayout) -> None:
    column = Column(Shape(4, 2, 64, 16, kv_layout=layout.value), PROFILES["nvfp4"], 2, 2, 64)
    with PlainArena("cpu") as arena, pytest.raises(NotImplementedError, match="heads of their own"):
        build(arena, column, Recipe((19, 33), 5), "cpu")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("values", list(Values))
@pytest.mark.parametrize("layout", [KvLayout.FUSED_HND, KvLayout.SEPARATE_NHD])
def test_nvfp4_operands(layout: KvLayout, values: Values, interleaved: bool) -> None:
    column = Column(Shape(4, 2, 64, 16, kv_layout=layout.value), PROFILES["nvfp4"], 2, 2, 64)
    recipe = Recipe((19, 33), 5, values=values, interleaved_v_scales=interleaved)
    with PlainArena("cpu") as arena:
        operands = build(arena, column, recipe, "cpu")
        step = operands.step
        assert step.kv_block_scales is not None
        assert step.k.dtype == torch.uint8 and step.k.shape == (8, 16, 2, 32)
        assert [tuple(scales.shape) for scales in step.kv_block_scales] == [(8, 16, 2, 4)] * 2
        for row, (keys, drawn) in enumerate(operands.unquantised()):
            ids = torch.tensor(operands.pages[row])
            for held, wanted, exact in zip(operands.caches, (keys, drawn), values.exact, strict=True):
                found = held.pages(ids, torch.float64).flatten(0, 1)[: len(wanted)]
                error = float((found - wanted).norm() / wanted.norm())
                assert error == 0.0 if exact else error < 0.13
        if values is not Values.RANDOM:  # codes are exact
            codes = operands.caches[1].pages(torch.tensor(operands.pages[0]), torch.float64)
            assert set(codes.flatten(0, 1)[:19].flatten().tolist()) <= {-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6}
