"""One half of a KV pool as it is stored, whatever its dtype: values in, values out, NaN in chosen places.

An unquantised or e4m3 cache is one tensor. An nvfp4 cache is two: packed e2m1 codes, and an e4m3 scale for
each 16 of them along head_dim (``Step.kv_block_scales``). Engines that serve the trtllm-gen kernels store
V's scales interleaved by four tokens (FlashInfer's ``nvfp4_quantize_paged_kv_cache``); others store them as
they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autotune.arena.contents import HOSTILE_K, HOSTILE_V, bits, pattern, quantise, stored
from autotune.arena.nvfp4 import BLOCK, decode, encode, interleaved_place

if TYPE_CHECKING:
    from autotune.routes.base import Step

# A NaN by element size. Its payload may come through arithmetic, so it must not be an output's poison.
NAN_BITS = {1: 0x7F, 2: 0x7FC0, 4: 0x7FC00000, 8: 0x7FF8000000000000}


@dataclass(frozen=True, slots=True)
class KvCache:
    """K or V of a pool.

    Attributes:
        data: [num_pages, page_size, num_kv_heads, dim] logical NHD view, any strides; nvfp4: uint8 with
            dim / 2 packed codes, low half first.
        scale: dequantisation scale of the whole cache; 1.0 where it is not quantised.
        hostile: what a place that no request may read holds, before scaling.
        block_scales: nvfp4 only: e4m3 [num_pages, page_size, num_kv_heads, dim / 16] as stored.
        interleaved: ``block_scales`` are stored interleaved by four tokens.
    """

    data: torch.Tensor
    scale: float
    hostile: float
    block_scales: torch.Tensor | None = None
    interleaved: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that is stored."""
        return (self.data,) if self.block_scales is None else (self.data, self.block_scales)

    def fill_hostile(self, ids: torch.Tensor | None = None) -> None:
        """Write the hostile value into the pages ``ids``; None: into all."""
        for tensor, integer in zip(self.tensors, self._hostile_bits(), strict=True):
            if ids is None:
                bits(tensor).fill_(integer)
            else:
                bits(tensor)[ids] = integer

    def fill_nan(self, ids: torch.Tensor) -> None:
        """Make every value of the pages ``ids`` NaN."""
        # as integers: not every device fills fp8 by index
        for tensor, integer in zip(self.tensors, self._nan_bits(), strict=True):
            bits(tensor)[ids] = integer

    def fill_nan_after(self, ids: torch.Tensor, used: torch.Tensor) -> None:
        """Make every value of the pages ``ids`` NaN but those of each one's first ``used`` slots."""
        slots = torch.arange(self.data.shape[1], device=self.data.device)
        dead = slots >= used[:, None]
        page, slot = ids[:, None].expand_as(dead)[dead], slots.expand_as(dead)[dead]
        code, *scale = self._nan_bits()
        bits(self.data)[page, slot] = code
        if self.block_scales is not None:
            at_slots, at_blocks = self._places(slot)
            bits(self.block_scales)[page[:, None], at_slots, :, at_blocks] = scale[0]

    def write_pages(self, ids: torch.Tensor, values: torch.Tensor, dead: torch.Tensor, exact: bool) -> None:
        """Write whole pages.

        Args:
            values: fp32 [len(ids), page_size, num_kv_heads, dim], before scaling.
            dead: bool [len(ids), page_size]: slots that get the hostile value instead.
            exact: the values are codes that the dtype holds exactly; see :func:`nvfp4.encode`.
        """
        dead = dead[:, :, None, None]
        if self.block_scales is None:
            cast = quantise(values, self.scale, self.data.dtype)
            bits(cast).masked_fill_(dead, self._hostile_bits()[0])
            bits(self.data)[ids] = bits(cast)
            return
        codes, scales = encode(values / self.scale, exact)
        code, scale = self._hostile_bits()
        self.data[ids] = codes.masked_fill_(dead, code)
        bits(scales).masked_fill_(dead, scale)
        self._store_scales(ids, scales)

    def write_tokens(
        self, pages: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, exact: bool
    ) -> None:
        """Write single tokens: fp32 [len(pages), num_kv_heads, dim], before scaling."""
        if self.block_scales is None:
            bits(self.data)[pages, slots] = bits(quantise(values, self.scale, self.data.dtype))
            return
        codes, scales = encode(values / self.scale, exact)
        self.data[pages, slots] = codes
        at_slots, at_blocks = self._places(slots)
        # the advanced indices come first: [tokens, blocks, heads]
        bits(self.block_scales)[pages[:, None], at_slots, :, at_blocks] = bits(scales).transpose(1, 2)

    def pages(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of the pages ``ids`` (any shape): [*ids.shape, page_size, num_kv_heads, dim], before the
        cache's own scale."""
        if self.block_scales is None:
            return bits(self.data)[ids].view(self.data.dtype).to(dtype)
        flat = ids.reshape(-1)
        values = decode(self.data[flat], self._linear_scales(flat), dtype)
        return values.view(*ids.shape, *values.shape[1:])

    def tokens(self, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The values of single tokens: fp32 [*pages.shape, num_kv_heads, dim], before the cache's scale."""
        if self.block_scales is None:
            return bits(self.data)[pages, slots].view(self.data.dtype).to(torch.float32)
        at_slots, at_blocks = self._places(slots.reshape(-1))
        flat = pages.reshape(-1)
        scales = bits(self.block_scales)[flat[:, None], at_slots, :, at_blocks]
        scales = scales.transpose(1, 2).contiguous().view(torch.float8_e4m3fn)
        values = decode(self.data[flat, slots.reshape(-1)], scales, torch.float32)
        return values.view(*pages.shape, *values.shape[1:])

    def reverse(self, ids: torch.Tensor) -> None:
        """Reverse what the pages ``ids`` hold along head_dim: other contents of the same kind."""
        raw = bits(self.data)
        raw.index_copy_(0, ids, raw.index_select(0, ids).flip(-1))
        if self.block_scales is not None:
            linear = self._linear_scales(ids)
            self._store_scales(ids, bits(linear).flip(-1).view(linear.dtype))

    def _nan_bits(self) -> tuple[int, ...]:
        """NaN in each of ``tensors``. e2m1 has none: its scales do, and its codes are as large as can be."""
        return (NAN_BITS[self.data.element_size()],) if self.block_scales is None else (0x77, NAN_BITS[1])

    def _hostile_bits(self) -> tuple[int, ...]:
        if self.block_scales is None:
            dtype = self.data.dtype
            return (pattern(stored(self.hostile, self.scale, dtype), dtype),)
        # two codes of 6 a byte, under a scale that makes them the hostile value
        return 0x77, pattern(stored(self.hostile / 6.0, self.scale, torch.float8_e4m3fn), torch.float8_e4m3fn)

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the block scales of tokens lie within a page: two int64 [len(slots), blocks]."""
        assert self.block_scales is not None
        count = self.block_scales.shape[3]
        blocks = torch.arange(count, device=slots.device).expand(len(slots), count)
        if self.interleaved:
            return interleaved_place(slots[:, None], blocks, count)
        return slots[:, None].expand_as(blocks), blocks

    def _linear_scales(self, ids: torch.Tensor) -> torch.Tensor:
        """Block scales of the pages ``ids`` as they come: e4m3 [len(ids), page_size, heads, blocks]."""
        assert self.block_scales is not None
        stored_scales = bits(self.block_scales)[ids]
        if not self.interleaved:
            return stored_scales.view(torch.float8_e4m3fn)
        slots, blocks = self._places(torch.arange(self.data.shape[1], device=self.data.device))
        linear = stored_scales.permute(0, 2, 1, 3)[:, :, slots, blocks]  # [ids, heads, page_size, blocks]
        return linear.permute(0, 2, 1, 3).contiguous().view(torch.float8_e4m3fn)

    def _store_scales(self, ids: torch.Tensor, linear: torch.Tensor) -> None:
        assert self.block_scales is not None
        raw = bits(linear)
        if self.interleaved:
            slots, blocks = self._places(torch.arange(self.data.shape[1], device=self.data.device))
            turned = torch.empty_like(raw).permute(0, 2, 1, 3)
            turned[:, :, slots, blocks] = raw.permute(0, 2, 1, 3)
            raw = turned.permute(0, 2, 1, 3)
        bits(self.block_scales)[ids] = raw


def kv_caches(step: Step, interleaved: bool = False) -> tuple[KvCache, KvCache]:
    """K and V of a step; ``interleaved``: as for :class:`KvCache`, of V's block scales."""
    k_blocks, v_blocks = step.kv_block_scales or (None, None)
    return (
        KvCache(step.k, step.k_scale, HOSTILE_K, k_blocks),
        KvCache(step.v, step.v_scale, HOSTILE_V, v_blocks, interleaved and v_blocks is not None),
    )


def block_count(dims: int) -> int:
    """Block scales of one token and head with ``dims`` values.

    Raises:
        ValueError: ``dims`` is no multiple of 16.
    """
    if dims % BLOCK:
        raise ValueError(f"an nvfp4 cache has one scale for {BLOCK} values: head_dim {dims} is no multiple")
    return dims // BLOCK
