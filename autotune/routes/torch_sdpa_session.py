"""The session of ``torch-sdpa``: one padded batch, one fused call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autotune.routes import torch_paged as paged

if TYPE_CHECKING:
    from autotune.routes.base import Allocate, Capacity, Step


class SdpaSession:
    """See :class:`autotune.routes.base.Session`."""

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        paged.check_capacity(capacity)
        column = capacity.column
        self._shape, self._q_len = column.shape, column.q_len
        batch, span = capacity.max_batch_size, paged.span_pages(column)
        self._query = paged.Query(capacity, allocate)
        self._gathers = [paged.Gather(n, capacity, allocate, batch * span, batch * span) for n in "kv"]
        tokens = span * column.shape.page_size
        self._end_mask = paged.EndMask(capacity, allocate, tokens)
        # without new tokens that hide from one another, all rows of a request share a line of the mask
        lines = self._q_len * column.shape.group if self._q_len > 1 else 1
        self._masks = allocate("masks", (batch * lines * tokens,), paged.DTYPES[column.dtypes.q])
        self._lines = lines
        self._mask: torch.Tensor | None = None
        self._copies: list[paged.Copy] = []
        self._dead: tuple[torch.Tensor, torch.Tensor] | None = None
        self._dead_tails: list[torch.Tensor] = []
        self._empty: list[int] = []
        self._zero = torch.zeros((), dtype=paged.DTYPES[column.dtypes.kv])
        self._scale = self._v_scale = 1.0
        self._batch = 0

    def prepare(self, step: Step) -> None:
        page = self._shape.page_size
        lens = paged.lengths(step)
        self._batch = len(lens)
        if not any(lens):  # nobody owns a page that could be read
            self._copies = []
            return
        self._query.prepare(step)
        self._scale, self._v_scale = step.sm_scale * step.k_scale, step.v_scale
        first = [paged.first_page(self._shape, kv_len, self._q_len) for kv_len in lens]
        pages = [-(-kv_len // page) - start for kv_len, start in zip(lens, first, strict=True)]
        width = max(pages)
        tokens = max(kv_len - start * page for kv_len, start in zip(lens, first, strict=True))

        # A page past a row's last one is read as the row's first: its own, live and finite.
        starts = torch.tensor(first)[:, None]
        column = torch.arange(width)[None, :]
        column = torch.where(column < torch.tensor(pages)[:, None], column + starts, starts)
        table = step.page_table.gather(1, column)
        self._empty = [row for row, kv_len in enumerate(lens) if kv_len == 0]
        for row in self._empty:  # owns no page; its output is set to zero
            table[row] = table[max(range(len(lens)), key=lens.__getitem__), 0]
        self._copies = []
        for gather, cache in zip(self._gathers, (step.k, step.v), strict=True):
            gather.reset()
            self._copies.append(gather.copy(paged.source(cache), table, tokens))

        shape = (self._batch, self._lines, tokens)
        mask = self._masks[: self._batch * self._lines * tokens].view(shape)
        dead_rows: list[int] = []
        dead_slots: list[int] = []
        self._dead_tails = []
        hides = False
        for row, (kv_len, start, count) in enumerate(zip(lens, first, pages, strict=True)):
            live = kv_len - start * page
            end_mask = self._end_mask(kv_len, start * page, kv_len) if kv_len else None
            if end_mask is None:
                mask[row, :, :live].zero_()
            else:
                mask[row, :, :live].copy_(end_mask[: self._lines])
            mask[row, :, live:].fill_(paged.HIDDEN)
            hides = hides or end_mask is not None or live < tokens
            # Slots behind the row's last token are hidden, but a NaN in them would get through a mask. A
            # row that is seen less than a page of has them in every copy of that page.
            if live < page:
                views = [copy.gathered[row, :, live:] for copy in self._copies]
                self._dead_tails += views if live < tokens else []
                continue
            end = min(tokens, count * page)
            dead_slots += range(live, end)
            dead_rows += [row] * (end - live)
        self._mask = mask[:, None] if hides else None
        self._dead = (torch.tensor(dead_rows), torch.tensor(dead_slots)) if dead_rows else None

    def run(self, out: torch.Tensor) -> None:
        if not self._copies:
            out.zero_()
            return
        self._query.run()
        for copy in self._copies:
            copy.run()
            if self._dead is not None:
                copy.gathered.transpose(1, 2).index_put_(self._dead, self._zero)
        for tail in self._dead_tails:
            tail.zero_()
        result = torch.nn.functional.scaled_dot_product_attention(
            self._query.folded,
            self._copies[0].gathered,
            self._copies[1].gathered,
            attn_mask=self._mask,
            scale=self._scale,
        )
        rows = self._query.unfolded(out, self._batch)
        rows.copy_(result.view(rows.shape))
        for row in self._empty:
            rows[row].zero_()
        if self._v_scale != 1.0:
            out.mul_(self._v_scale)

    def close(self) -> None:
        self.__dict__.clear()
