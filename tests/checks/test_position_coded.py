"""That codes are exact and unique, that caps separate, and that ``hidden`` sees masks at any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune.arena.operands import Recipe, Values, build, position_code
from autotune.arena.plain import PlainArena
from autotune.checks import oracle, registry
from autotune.checks.position_coded import (
    MEAN_MARGIN,
    align_with_hidden,
    recognise,
    target_codes,
    uniform_cap,
)
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.domain.verdict import FailureKind
from autotune.routes.planted import Planted

POSITION_CODED = registry.get("position_coded")


def test_codes_differ_between_tokens_rows_and_heads() -> None:
    rows = [position_code(row, torch.arange(1024), 64) for row in range(4)]
    codes = torch.cat([code.roll(head, dims=1) for code in rows for head in range(3)])
    assert len(torch.unique(codes, dim=0)) == len(codes)
    assert codes.abs().max() <= 8 and torch.equal(codes, codes.round())
    # neighbours, of which a fault takes one for the other, differ nearly everywhere
    for near, far in ((rows[0][1:], rows[0][:-1]), (rows[0], rows[1]), (rows[0][16:], rows[0][:-16])):
        assert ((near != far).float().mean(dim=1) > 0.5).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_token_moves_the_mean_out_of_its_bound_up_to_the_cap(dtype: str) -> None:
    column = Column(Shape(2, 1, 64, 16), PROFILES[dtype], 1, 1, 4096)
    bound = oracle.mean_bound(column)
    cap = uniform_cap(bound)
    assert cap >= 512
    codes = position_code(0, torch.arange(cap + 1), 64).double()
    exact, more, less = (codes[:n].mean(dim=0) for n in (cap, cap + 1, cap - 1))
    for wrong in (more, less):
        assert (wrong - exact).norm() / exact.norm() > MEAN_MARGIN / 2 * bound


@pytest.mark.parametrize("window_left", [-1, 40])
def test_targets_have_the_exact_answer(window_left: int) -> None:
    column = Column(Shape(4, 2, 64, 16, window_left=window_left), PROFILES["fp32"], 3, 2, 2048)
    with PlainArena() as arena:
        recipe = Recipe((2000, 77), seed=4, values=Values.POSITION_ONE_HOT)
        operands = build(arena, column, recipe, "cpu")
        exact = oracle.reference(operands)
        assert torch.allclose(exact, target_codes(operands).double(), atol=1e-6)


@pytest.mark.parametrize(("kv_len", "window_left"), [(4096, -1), (4096, 100), (6, -1)])
def test_a_hidden_token_seen_is_far_outside_the_bound(kv_len: int, window_left: int) -> None:
    column = Column(Shape(2, 1, 64, 16, window_left=window_left), PROFILES["bf16"], 2, 1, 4096)
    bound = oracle.bound(column)
    with PlainArena() as arena:
        recipe = Recipe((kv_len,), seed=4, values=Values.POSITION_ONE_HOT)
        operands = build(arena, column, recipe, "cpu")
        assert align_with_hidden(operands)
        right = oracle.reference(operands)
        keys = operands.step.k[operands.pages[0]].flatten(0, 1)[:kv_len, 0].double()
        values = operands.step.v[operands.pages[0]].flatten(0, 1)[:kv_len, 0].double()
        first, end = oracle.visible(kv_len, 2, 0, window_left)
        logits = operands.step.q[0, 0].double() @ keys[first : end + 1].T * operands.step.sm_scale
        wrong = torch.softmax(logits, dim=-1) @ values[first : end + 1]
    assert (wrong - right[0, 0]).norm() / right[0, 0].norm() > 10 * bound


def test_nothing_is_hidden_from_a_single_query() -> None:
    column = Column(Shape(2, 1, 64, 16), PROFILES["bf16"], 1, 1, 64)
    with PlainArena() as arena:
        recipe = Recipe((40,), seed=4, values=Values.POSITION_ONE_HOT)
        assert not align_with_hidden(build(arena, column, recipe, "cpu"))


def test_a_wrong_token_is_named() -> None:
    column = Column(Shape(4, 2, 64, 16), PROFILES["bf16"], 2, 2, 256)
    with PlainArena() as arena:
        operands = build(arena, column, Recipe((200, 90), seed=4, values=Values.POSITION_ONE_HOT), "cpu")
        operands.out.copy_(target_codes(operands))
        operands.out[1, 0] = position_code(0, torch.tensor([123]), 64)[0].bfloat16()
        operands.out[2, 3] = position_code(0, torch.tensor([5]), 64)[0].roll(1).bfloat16()
        operands.out[3, 0] = 0.0
        assert recognise(operands, 1, 0) == "that of token 123 of request 0, KV head 0"
        assert recognise(operands, 2, 3) == "that of token 5 of request 0, KV head 1"
        assert recognise(operands, 3, 0) == "no token's code"


def test_one_hot_alone_catches_a_late_page_swap(make_trial: Any) -> None:
    """Two late pages swapped: no mean and no mask shows it, the code of the target does."""

    class Swapped(Planted):
        def open(self, capacity: Any, allocate: Any) -> Any:
            session = super().open(capacity, allocate)
            plain = session.values

            def values(row: int, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
                if len(pages) > 64:
                    pages = torch.cat([pages[:-3], pages[-2:-1], pages[-3:-2], pages[-1:]])
                return plain(row, pages, kv_len)

            session.values = values  # type: ignore[method-assign]
            return session

    column = Column(Shape(4, 2, 64, 16), PROFILES["bf16"], 24, 1, 2048)
    row = POSITION_CODED.run(make_trial(Swapped("planted-clean"), column, (2048,)))
    assert row.kind is FailureKind.WRONG_OUTPUT
    assert "wanted the code of token" in row.detail and "got that of token" in row.detail
