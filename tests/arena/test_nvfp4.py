"""The NVFP4 format, against its definition and against FlashInfer's order of V's scales."""

from __future__ import annotations

import pytest
import torch

from autotune.arena.nvfp4 import LEVELS, decode, encode, interleaved_place, interleaves_v_scales
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape


def test_levels_are_exact_under_a_scale_of_one() -> None:
    values = torch.tensor([*LEVELS, *(-level for level in LEVELS)])
    codes, scales = encode(values[None], exact=True)
    # the format's table: sign, two bits of exponent, one of mantissa; low half first; -0 is 0
    assert codes[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE]
    assert scales.float().tolist() == [[1.0]]
    assert torch.equal(decode(codes, scales, torch.float64)[0], values.double())


def test_every_value_takes_the_nearest_level() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn((64, 128), generator=generator) * 3
    codes, scales = encode(values)
    stored = decode(codes, scales, torch.float64)
    for row in range(0, 64, 16):
        for block in range(8):
            scale = float(scales[row, block])
            largest = float(values[row, block * 16 : block * 16 + 16].abs().max())
            # e4m3 keeps 4 significant bits
            assert scale == pytest.approx(largest / 6.0, rel=2.0**-4)
            for d in range(block * 16, block * 16 + 16):
                value, nearest = float(values[row, d]), float(stored[row, d])
                choices = [sign * level * scale for level in LEVELS for sign in (1, -1)]
                assert abs(value - nearest) == pytest.approx(min(abs(value - choice) for choice in choices))
    assert float((stored - values).norm() / values.norm()) < 0.13


def test_a_block_of_zeros() -> None:
    codes, scales = encode(torch.zeros((1, 16)))
    assert torch.equal(decode(codes, scales, torch.float64), torch.zeros((1, 16), dtype=torch.float64))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_interleaving_is_flashinfers(head_dim: int) -> None:
    page, count = 32, head_dim // 16
    linear = torch.arange(page * count).view(page, count)
    # what nvfp4_quantize_paged_kv_cache does to the plane of one page and head
    expected = linear.reshape(page // 4, 4, 4, count // 4).permute(0, 2, 3, 1).reshape(page, count)
    slots = torch.arange(page)[:, None].expand(page, count)
    blocks = torch.arange(count).expand(page, count)
    at_slots, at_blocks = interleaved_place(slots, blocks, count)
    found = torch.empty_like(linear)
    found[at_slots, at_blocks] = linear
    assert torch.equal(found, expected)


def test_who_interleaves() -> None:
    shape = Shape(8, 1, 128, 64)
    nvfp4 = Column(shape, PROFILES["nvfp4"], 4, 2, 4096)
    fp8 = Column(shape, PROFILES["fp8"], 4, 2, 4096)

    def on(capability: str | None) -> Facts:
        return Facts("cuda", {"compute_capability": capability}, {})

    assert interleaves_v_scales(nvfp4, on("10.0")) and interleaves_v_scales(nvfp4, on("10.3"))
    assert not interleaves_v_scales(nvfp4, on("9.0")) and not interleaves_v_scales(nvfp4, on("12.0"))
    assert not interleaves_v_scales(fp8, on("10.0"))
    assert not interleaves_v_scales(nvfp4, on(None)) and not interleaves_v_scales(nvfp4, Facts("cpu", {}, {}))
