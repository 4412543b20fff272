"""Which layout two views of a KV cache are: a wrong name would look up what another pool was proven for."""

from __future__ import annotations

import pytest
import torch

from autotune.arena.operands import Recipe, build
from autotune.arena.plain import PlainArena
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import KvLayout, Shape
from autotune.engines.pool import layout_of

PAGES, TOKENS, HEADS, DIM = 5, 16, 2, 64
Views = tuple[torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("layout", KvLayout)
@pytest.mark.parametrize("profile", ["bf16", "fp8"])
def test_operands_of_every_layout_are_recognised(layout: KvLayout, profile: str) -> None:
    column = Column(Shape(4, HEADS, DIM, TOKENS, kv_layout=layout.value), PROFILES[profile], 2, 2, 64)
    with PlainArena("cpu") as arena:
        step = build(arena, column, Recipe((20, 33), seed=1), "cpu").step
        assert layout_of(step.k, step.v) == layout.value


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("order", "wanted"), [((0, 1, 2, 3), "packed-hnd"), ((0, 2, 1, 3), "packed-nhd")])
def test_vllms_cache_is_packed(heads: int, order: tuple[int, ...], wanted: str) -> None:
    """As vLLM 0.33 makes its views: logical [B, H, N, 2 x D], permuted to memory's order, split in two."""
    logical = (PAGES, heads, TOKENS, 2 * DIM)
    raw = torch.zeros([logical[axis] for axis in order], dtype=torch.bfloat16)
    cache = raw.permute(*order)  # an exchange of two axes undoes itself
    k, v = (half.transpose(1, 2) for half in (cache[..., :DIM], cache[..., DIM:]))
    assert layout_of(k, v) == (wanted if heads > 1 else "packed-nhd")


def _between_layers() -> Views:
    """BLNHC: the pages of two layers in turn."""
    raw = torch.zeros((PAGES, 2, TOKENS, HEADS, 2 * DIM))
    return raw[:, 1, ..., :DIM], raw[:, 1, ..., DIM:]


def _padded_pages() -> Views:
    raw = torch.zeros((PAGES, TOKENS * HEADS * 2 * DIM + 64))
    pages = raw[:, : TOKENS * HEADS * 2 * DIM].view(PAGES, TOKENS, HEADS, 2 * DIM)
    return pages[..., :DIM], pages[..., DIM:]


def _v_first() -> Views:
    raw = torch.zeros((PAGES, TOKENS, HEADS, 2 * DIM))
    return raw[..., DIM:], raw[..., :DIM]


def _two_packed() -> Views:
    """K of one packed cache, V of another."""
    return torch.zeros((PAGES, TOKENS, HEADS, 2 * DIM))[..., :DIM], torch.zeros(
        (PAGES, TOKENS, HEADS, 2 * DIM)
    )[..., DIM:]


def _spread_heads() -> Views:
    raw = torch.zeros((2, PAGES, TOKENS, 2 * HEADS, DIM))
    return raw[0, :, :, ::2], raw[1, :, :, ::2]


def _v_pages_apart() -> Views:
    """A fused pool but that V's pages have gaps, which only its own stride says."""
    raw = torch.zeros((3 * PAGES, TOKENS, HEADS, DIM))
    return raw[:PAGES], raw[PAGES::2]


MADE = [_between_layers, _padded_pages, _v_first, _two_packed, _spread_heads, _v_pages_apart]


@pytest.mark.parametrize("made", MADE)
def test_what_no_table_has_is_no_layout(made: object) -> None:
    assert callable(made)
    k, v = made()
    assert layout_of(k, v) is None


def test_strides_that_no_element_uses_are_not_looked_at() -> None:
    raw = torch.zeros((PAGES, TOKENS, 1, 2 * DIM))
    k, v = (
        half.as_strided(half.shape, (TOKENS * 2 * DIM, 2 * DIM, odd, 1), half.storage_offset())
        for half, odd in zip((raw[..., :DIM], raw[..., DIM:]), (7, 9), strict=True)
    )
    assert layout_of(k, v) == "packed-nhd"
