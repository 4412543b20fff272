"""XQA's packed mask and the scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autotune.domain.cell import Column
from autotune.routes.flashinfer.example import example_step
from autotune.routes.flashinfer.masks import causal_mask_rows, fill_causal_mask
from autotune.routes.flashinfer.scales import bmm_scales


def test_mask_of_three_tokens_is_what_sglang_builds() -> None:
    assert causal_mask_rows(3) == [[1, 0], [3, 0], [7, 0]]


def test_mask_past_32_tokens_takes_a_second_word_low_half_first() -> None:
    rows = causal_mask_rows(33)
    assert rows[31] == [0xFFFF, 0xFFFF, 0, 0]
    assert rows[32] == [0xFFFF, 0xFFFF, 1, 0]
    assert causal_mask_rows(17)[16] == [0xFFFF, 1]


@pytest.mark.parametrize("q_len", [2, 4, 8, 16, 31, 40])
def test_filled_mask_is_lower_triangular_for_every_request(q_len: int) -> None:
    mask = torch.empty((3, q_len, 2 * -(-q_len // 32)), dtype=torch.uint16)
    fill_causal_mask(mask)
    words = mask.view(torch.int16).to(torch.int32) & 0xFFFF
    bits = torch.stack([(words >> bit) & 1 for bit in range(16)], dim=-1).flatten(2)[..., :q_len]
    assert torch.equal(bits, torch.tril(torch.ones(q_len, q_len, dtype=torch.int32)).expand(3, -1, -1))


def test_scales_are_floats_and_xqa_recovers_the_logit_scale(make_column: Callable[..., Column]) -> None:
    step, _ = example_step(make_column(kv="e4m3"), (70,))
    step.k_scale, step.v_scale, step.sm_scale = 2, 0.5, 128**-0.5
    scales = bmm_scales(step)
    assert isinstance(scales.bmm1, float) and isinstance(scales.bmm2, float)
    assert scales.bmm1 == pytest.approx(2 * 128**-0.5) and scales.bmm2 == 0.5
    # flashinfer/decode.py: kv_scale = bmm2, q_scale = bmm1 / kv_scale * sqrt(head_dim); the kernel
    # multiplies q.k by q_scale * kv_scale / sqrt(head_dim)
    q_scale = scales.bmm1 / scales.bmm2 * 128**0.5
    assert q_scale * scales.bmm2 / 128**0.5 == pytest.approx(scales.bmm1)
    assert bmm_scales(step, q_scale=3.0, o_scale=4.0).bmm2 == 0.125
