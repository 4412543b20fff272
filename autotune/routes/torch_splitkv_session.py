"""The session of ``torch-splitkv``: blocks of every request, then their merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autotune.routes import torch_paged as paged

if TYPE_CHECKING:
    from autotune.routes.base import Allocate, Capacity, Step

# 1,024 tokens at a page of 16: K and V of a block stay in a core's L2 between the copy and its use.
BLOCK_PAGES = 64


@dataclass(slots=True)
class _Block:
    k: paged.Copy
    v: paged.Copy
    mask: torch.Tensor | None


class SplitKvSession:
    """See :class:`autotune.routes.base.Session`."""

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        paged.check_capacity(capacity)
        column, shape = capacity.column, capacity.column.shape
        self._shape, self._q_len = shape, column.q_len
        span = paged.span_pages(column)
        # The last block holds all new tokens, so that it alone needs the causal mask.
        self._block = min(span, max(BLOCK_PAGES, -(-column.q_len // shape.page_size) + 1))
        splits, rows = -(-span // self._block), column.q_len * shape.group
        self._query = paged.Query(capacity, allocate)
        index = capacity.max_batch_size * span
        self._gathers = [paged.Gather(name, capacity, allocate, self._block, index) for name in "kv"]
        tokens = (span if shape.window_left >= 0 else self._block) * shape.page_size
        self._mask = paged.EndMask(capacity, allocate, tokens)
        self._partial = allocate(
            "partial", (splits, shape.num_kv_heads, rows, shape.head_dim_vo), torch.float32
        )
        self._lse = allocate("lse", (splits, shape.num_kv_heads, rows, 1), torch.float32)
        self._merged = allocate("merged", self._partial.shape[1:], torch.float32)
        # Views cost as much as the small operations of a merge: made once, not in every launch.
        self._slots = [(self._partial[i : i + 1], self._lse[i : i + 1, ..., 0]) for i in range(splits)]
        self._merges = [(self._partial[:count], self._lse[:count]) for count in range(splits + 1)]
        self._requests: list[list[_Block]] = []
        self._scale = self._v_scale = 1.0

    def prepare(self, step: Step) -> None:
        page = self._shape.page_size
        self._query.prepare(step)
        self._scale, self._v_scale = step.sm_scale * step.k_scale, step.v_scale
        sources = paged.source(step.k), paged.source(step.v)
        for gather in self._gathers:
            gather.reset()
        self._requests = []
        for row, kv_len in enumerate(paged.lengths(step)):
            start, last = paged.first_page(self._shape, kv_len, self._q_len), -(-kv_len // page)
            table = step.page_table[row : row + 1]
            blocks: list[_Block] = []
            while last > start:
                first = max(start, last - self._block)
                begin, end = first * page, min(kv_len, last * page)
                k, v = (
                    gather.copy(cache, table[:, first:last], end - begin)
                    for gather, cache in zip(self._gathers, sources, strict=True)
                )
                blocks.append(_Block(k, v, self._mask(kv_len, begin, end)))
                last = first
            self._requests.append(blocks)

    def run(self, out: torch.Tensor) -> None:
        self._query.run()
        rows = self._query.unfolded(out, len(self._requests))
        for row, blocks in enumerate(self._requests):
            query, into, count = self._query.folded[row : row + 1], rows[row], len(blocks)
            if count == 0:
                into.zero_()
                continue
            for number, block in enumerate(blocks):
                block.k.run()
                block.v.run()
                result, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query, block.k.gathered, block.v.gathered, attn_mask=block.mask, scale=self._scale
                )
                if count == 1:
                    into.copy_(result.view(into.shape))
                    break
                slot, slot_lse = self._slots[number]
                slot.copy_(result)
                slot_lse.copy_(lse)
            else:
                partial, weight = self._merges[count]
                torch.softmax(weight, 0, out=weight)
                torch.sum(partial.mul_(weight), 0, out=self._merged)
                into.copy_(self._merged.view(into.shape))
        if self._v_scale != 1.0:
            out.mul_(self._v_scale)

    def close(self) -> None:
        self.__dict__.clear()
