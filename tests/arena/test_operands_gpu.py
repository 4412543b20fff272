"""Operands made on a GPU."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch

from autotune.arena.operands import (
    HOSTILE_K,
    HOSTILE_V,
    PageOrder,
    QueryStride,
    Recipe,
    Values,
    build,
    twin,
)
from autotune.arena.plain import PlainArena
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape

pytestmark = pytest.mark.gpu
LENS = (33, 1, 150, 16)


@pytest.mark.parametrize("layout", ["fused-nhd", "fused-hnd", "interleaved-nhd", "separate-hnd"])
@pytest.mark.parametrize("profile", ["bf16", "fp8"])
def test_live_slots_hold_the_drawn_values_and_all_others_are_hostile(layout: str, profile: str) -> None:
    column = Column(Shape(4, 2, 64, 16, kv_layout=layout), PROFILES[profile], 3, 4, 200)
    for kind, order, stride in product(Values, PageOrder, QueryStride):
        recipe = Recipe(LENS, 7, values=kind, order=order, query_stride=stride, table_garbage=-1)
        with PlainArena("cuda") as arena:
            made = build(arena, column, recipe, "cuda")
            again = build(arena, column, recipe, "cuda")
        step = made.step
        for row, (k, v) in enumerate(made.unquantised()):
            ids = step.page_table[row, : -(-LENS[row] // 16)].long()
            assert ids.tolist() == made.pages[row]
            for pool, drawn in ((step.k, k), (step.v, v)):
                got = pool.float()[ids].flatten(0, 1)[: LENS[row]]
                assert torch.equal(got, drawn.to(pool.dtype).float())
        live = sum(LENS) * 2 * 64
        assert int((step.k.float() == HOSTILE_K).sum()) == step.k.numel() - live
        assert int((step.v.float() == HOSTILE_V).sum()) == step.v.numel() - live
        assert torch.equal(step.q, again.step.q)
        assert torch.equal(step.k.float(), again.step.k.float())
        if made.targets is not None:
            pick = int(made.targets[2, 1])
            key = step.k.float()[made.pages[2][pick // 16], pick % 16]
            assert torch.equal(step.q[2 * 3 + 1].float(), key.repeat_interleave(2, dim=0) * 8)


def test_a_large_batch_takes_no_time_per_row_and_no_copy_in_fp32() -> None:
    column = Column(Shape(8, 1, 128, 64), PROFILES["fp8"], 4, 256, 131_072)
    with PlainArena("cuda") as arena:
        build(arena, column, Recipe((1024,) * 256, 1), "cuda")
    with PlainArena("cuda") as arena:
        torch.cuda.synchronize()
        start = time.perf_counter()
        build(arena, column, Recipe((1024,) * 256, 1), "cuda")
        torch.cuda.synchronize()
        assert time.perf_counter() - start < 0.1
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with PlainArena("cuda") as arena:
        made = build(arena, column, Recipe((32_768,) * 256, 1), "cuda")  # 2 GiB of K and V
        other = twin(arena, made)
        held = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        assert held >= 4 * 2**30
        assert peak - held < 2 * 2**30
        assert torch.equal(
            made.step.k[-3:].view(torch.uint8).cpu(), other.step.k[-3:].view(torch.uint8).cpu()
        )
