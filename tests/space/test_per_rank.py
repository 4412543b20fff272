"""Per-rank shapes: heads are divided, KV heads are replicated past their number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.space import LayerKind, Model, SpaceError, attention_tp, load_model, per_rank_shape
from autotune.space.library import folder

FULL = LayerKind("full", 1)


def shipped(name: str) -> Model:
    return load_model(folder() / "models" / f"{name}.yaml")


@pytest.mark.parametrize(
    ("name", "attn_tp", "heads"),
    [
        ("qwen3.5-397b-a17b", 1, (32, 2, 256)),
        ("qwen3.5-397b-a17b", 2, (16, 1, 256)),
        ("qwen3.5-397b-a17b", 4, (8, 1, 256)),
        ("qwen3.5-397b-a17b", 8, (4, 1, 256)),
        ("qwen3-235b-a22b", 4, (16, 1, 128)),
        ("qwen3-235b-a22b", 8, (8, 1, 128)),
        ("llama-3.1-70b", 4, (16, 2, 128)),
        ("llama-3.1-70b", 8, (8, 1, 128)),
        ("llama-3.1-8b", 1, (32, 8, 128)),
        ("gpt-oss-120b", 8, (8, 1, 64)),
        ("glm-4.5", 8, (12, 1, 128)),
        ("minimax-m2", 8, (6, 1, 128)),
    ],
)
def test_known_ranks(name: str, attn_tp: int, heads: tuple[int, int, int]) -> None:
    shape = per_rank_shape(shipped(name), FULL, attn_tp, 64, "fused-nhd")
    assert (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim) == heads


def test_data_parallel_attention_divides_by_less() -> None:
    # TP 4, DP 4: every rank sees all heads
    assert attention_tp(4, 4) == 1
    assert attention_tp(8, 2) == 4
    assert attention_tp(8) == 8
    for tp, dp in ((8, 3), (0, 1), (4, 0)):
        with pytest.raises(SpaceError, match="DP attention needs a DP degree that divides TP"):
            attention_tp(tp, dp)


def test_a_sliding_window_counts_the_query_itself() -> None:
    model = shipped("gpt-oss-120b")
    shapes = {kind.kind: per_rank_shape(model, kind, 1, 64, "fused-nhd") for kind in model.attention}
    assert [(kind.kind, kind.layers) for kind in model.attention] == [("full", 18), ("sliding", 18)]
    assert shapes["full"].window_left == -1
    assert shapes["sliding"].window_left == 127
    assert all(shape.sinks for shape in shapes.values())


@pytest.mark.parametrize(
    ("attn_tp", "expected"),
    [
        (0, "m: attn_tp 0 does not divide its 24 attention heads"),
        (5, "m: attn_tp 5 does not divide its 24 attention heads"),
        (3, "m: attn_tp 3 does not divide its 4 KV heads"),
        (6, "m: attn_tp 6 is not a multiple of its 4 KV heads"),
    ],
)
def test_heads_that_do_not_divide(attn_tp: int, expected: str) -> None:
    model = Model("m", 24, 4, 128, (FULL,))
    with pytest.raises(SpaceError) as caught:
        per_rank_shape(model, FULL, attn_tp, 64, "fused-nhd")
    assert str(caught.value) == expected


@given(kv_heads=st.integers(1, 16), group=st.integers(1, 24), attn_tp=st.integers(1, 64))
def test_invariants(kv_heads: int, group: int, attn_tp: int) -> None:
    model = Model("m", kv_heads * group, kv_heads, 128, (FULL,))
    try:
        shape = per_rank_shape(model, FULL, attn_tp, 16, "separate-hnd")
    except SpaceError:
        divides = model.num_attention_heads % attn_tp == 0
        assert not divides or (kv_heads % attn_tp and attn_tp % kv_heads)
        return
    assert shape.num_qo_heads * attn_tp == model.num_attention_heads
    # no KV head is lost, and none is held by more ranks than needed
    copies = shape.num_kv_heads * attn_tp
    assert copies == max(kv_heads, attn_tp)
    # a rank's query heads need exactly its KV heads
    for rank in range(attn_tp):
        first = rank * shape.num_qo_heads
        needed = {head // group for head in range(first, first + shape.num_qo_heads)}
        assert len(needed) == shape.num_kv_heads
