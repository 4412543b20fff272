"""What the two torch routes share: reading a paged pool, the end-aligned mask, folding the GQA group.

A chunk is a run of pages of one request. Its pages are copied by ``index_select`` into a workspace that
the session allocated when it was opened (fresh allocations of this size cost up to four times the copy),
and attention reads the copy. Which views a chunk needs is decided in ``prepare``; ``run`` only copies and
computes, so it reads the pool anew in every launch.

Which tokens a query sees: query i of ``q_len`` sees the tokens before ``kv_len - q_len + i + 1``, of those
the last ``window_left + 1`` if there is a window. In a padded row (``kv_len < q_len``) that may be none:
such a query sees token 0 alone, so that its output is finite. A row with ``kv_len`` 0 gives zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autotune.routes.contract import ContractError

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.shape import Shape
    from autotune.routes.base import Allocate, Capacity, Step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Added to a hidden token's logit. Finite, so that a chunk in which a query sees nothing gives a weight of
# exactly zero in the merge instead of a NaN; far below any logit that the dtypes can produce from live data.
HIDDEN = -1.0e30


def check_capacity(capacity: Capacity) -> None:
    """Raises ``ContractError`` for a capacity that no torch session can be opened at."""
    if torch.device(capacity.device).type != "cpu":
        raise ContractError("device", f"the torch routes run on the CPU, not on {capacity.device!r}")
    if capacity.max_batch_size < 1 or capacity.num_pages < 1:
        raise ContractError(
            "capacity",
            f"max_batch_size {capacity.max_batch_size} and num_pages {capacity.num_pages} must be positive",
        )


def span_pages(column: Column) -> int:
    """Most pages of one request that any query of a step can see."""
    shape = column.shape
    if shape.window_left < 0:
        return column.table_width
    # the span may begin and end inside a page
    return min(column.table_width, -(-(shape.window_left + column.q_len) // shape.page_size) + 1)


@dataclass(slots=True)
class Source:
    """K or V as what ``index_select`` reads.

    Attributes:
        rows: the pool cut into rows along dim 0; a row is a page, or one head of a page.
        step: row number of page p is ``p * step`` (plus the head, if ``per_head``).
    """

    rows: torch.Tensor
    step: int
    per_head: bool


def source(cache: torch.Tensor) -> Source:
    """Cut ``cache``, a [pages, page_size, heads, dim] view of any strides, into the longest dense rows.

    ``index_select`` copies dense rows with memcpy and anything else element by element. An interleaved
    pool is a dense pool of twice as many rows, of which K and V are every second one.
    """
    pages, page, heads, dim = cache.shape
    s0, s1, s2, s3 = cache.stride()
    token_major = (s2 == dim or heads == 1) and (s1 == heads * dim or page == 1)
    head_major = (s1 == dim or page == 1) and s2 == page * dim
    if s3 == 1 and (token_major or head_major):
        row = page * dim * (heads if token_major else 1)
        if s0 % row == 0:
            step = s0 // row
            count = (pages - 1) * step + (1 if token_major else heads)
            view = cache.as_strided((count, row), (row, 1), cache.storage_offset())
            return Source(view, step, not token_major)
    return Source(cache, 1, False)


@dataclass(slots=True)
class Copy:
    """One ``index_select`` of whole pages into a workspace.

    Attributes:
        gathered: [batch, num_kv_heads, tokens, head_dim] view of the workspace, valid once ``run`` ran.
    """

    rows: torch.Tensor
    index: torch.Tensor
    out: torch.Tensor
    gathered: torch.Tensor

    def run(self) -> None:
        """Copy the pages."""
        torch.index_select(self.rows, 0, self.index, out=self.out)


class Gather:
    """A workspace for K or V pages, and the row numbers to copy.

    Args:
        pages: most pages that one copy takes.
        total_pages: pages of all copies between two calls of ``reset``.
    """

    def __init__(
        self, name: str, capacity: Capacity, allocate: Allocate, pages: int, total_pages: int
    ) -> None:
        column = capacity.column
        self.shape: Shape = column.shape
        heads = self.shape.num_kv_heads
        size = pages * self.shape.page_size * heads * self.shape.head_dim
        self._workspace = allocate(f"{name}_gathered", (size,), DTYPES[column.dtypes.kv])
        self._index = allocate(f"{name}_rows", (total_pages * heads,), torch.int64)
        self._heads = torch.arange(heads)[:, None]
        self._used = 0

    def reset(self) -> None:
        """Forget the copies made so far."""
        self._used = 0

    def copy(self, cache: Source, pages: torch.Tensor, tokens: int) -> Copy:
        """The copy of ``pages`` [batch, n], of which the first ``tokens`` tokens are looked at."""
        batch, count = pages.shape
        heads, page, dim = self.shape.num_kv_heads, self.shape.page_size, self.shape.head_dim
        length = batch * count * (heads if cache.per_head else 1)
        index = self._index[self._used : self._used + length]
        self._used += length
        if cache.per_head:
            by_head = index.view(batch, heads, count)
            by_head.copy_(pages[:, None])
            by_head.mul_(cache.step).add_(self._heads)
        elif cache.step == 1:
            index.view(batch, count).copy_(pages)
        else:
            torch.mul(pages, cache.step, out=index.view(batch, count))
        dense = self._workspace[: batch * count * page * heads * dim]
        out = dense.view(length, *cache.rows.shape[1:])
        if cache.per_head:
            gathered = dense.view(batch, heads, count * page, dim)[:, :, :tokens]
        else:
            gathered = dense.view(batch, count * page, heads, dim)[:, :tokens].transpose(1, 2)
        return Copy(cache.rows, index, out, gathered)


class EndMask:
    """Additive masks. Counted from the end of the KV they are the same for every length, so one serves all.

    Args:
        tokens: how far back from the end a mask is asked for.
    """

    def __init__(self, capacity: Capacity, allocate: Allocate, tokens: int) -> None:
        column = capacity.column
        self.q_len, self.window = column.q_len, column.shape.window_left
        group, dtype = column.shape.group, DTYPES[column.dtypes.q]
        rows = self.q_len * group
        self._width = tokens if self.q_len > 1 or self.window >= 0 else 0
        self._full = self._short = None
        if self._width:
            back = torch.arange(tokens - 1, -1, -1)[None, :]  # tokens that follow
            own = torch.arange(self.q_len - 1, -1, -1)[:, None]  # new tokens that follow the query's own
            hidden = back < own
            if self.window >= 0:
                hidden = hidden | (back > own + self.window)
            self._full = allocate("mask", (rows, tokens), dtype)
            self._fill(self._full, hidden, group)
        if self.q_len > 1:
            # row n - 1 serves a padded row of n < q_len tokens: the queries before its start see token 0
            token, query = torch.arange(self.q_len)[None, :], torch.arange(self.q_len)[:, None]
            self._short = allocate("mask_padded", (self.q_len - 1, rows, self.q_len), dtype)
            for kv_len in range(1, self.q_len):
                own = (kv_len - self.q_len + query).clamp(min=0)
                hidden = token > own
                if self.window >= 0:
                    hidden = hidden | (token < own - self.window)
                self._fill(self._short[kv_len - 1], hidden, group)

    @staticmethod
    def _fill(mask: torch.Tensor, hidden: torch.Tensor, group: int) -> None:
        mask.zero_().masked_fill_(hidden.repeat_interleave(group, dim=0), HIDDEN)

    def __call__(self, kv_len: int, first: int, last: int) -> torch.Tensor | None:
        """Mask [q_len x group, last - first] of tokens ``first .. last - 1``; None if all see them."""
        if kv_len < self.q_len:
            assert self._short is not None
            return self._short[kv_len - 1][:, first:last]
        seen_by_first = last <= kv_len - self.q_len + 1
        seen_by_last = self.window < 0 or first >= kv_len - 1 - self.window
        if seen_by_first and seen_by_last:
            return None
        assert self._full is not None
        return self._full[:, self._width - (kv_len - first) : self._width - (kv_len - last)]


class Query:
    """The query with its GQA group folded into rows: [batch, num_kv_heads, q_len x group, head_dim]."""

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        column = capacity.column
        self.shape, self.q_len = column.shape, column.q_len
        rows = self.q_len * self.shape.group
        self._folded = allocate(
            "q_folded",
            (capacity.max_batch_size, self.shape.num_kv_heads, rows, self.shape.head_dim),
            DTYPES[column.dtypes.q],
        )
        self._source: torch.Tensor | None = None
        self.folded = self._folded

    def prepare(self, step: Step) -> None:
        """Bind to ``step``; a query that already lies as needed is not copied."""
        batch, shape = step.batch_size, self.shape
        heads, group, dim = shape.num_kv_heads, shape.group, shape.head_dim
        split = step.q.view(batch, self.q_len, heads, group, dim).transpose(1, 2)
        if heads == 1 and step.q.is_contiguous():
            self._source = None
            self.folded = step.q.view(batch, 1, self.q_len * group, dim)
        else:
            self._source = split
            self.folded = self._folded[:batch]

    def run(self) -> None:
        """Copy the query if it must be."""
        if self._source is not None:
            self.folded.view(self._source.shape).copy_(self._source)

    def unfolded(self, out: torch.Tensor, batch: int) -> torch.Tensor:
        """``out`` as [batch, num_kv_heads, q_len, group, head_dim], to copy results into."""
        shape = self.shape
        return out.view(batch, self.q_len, shape.num_kv_heads, shape.group, shape.head_dim_vo).transpose(1, 2)


def lengths(step: Step) -> tuple[int, ...]:
    """KV lengths on the host."""
    return step.host_kv_lens if step.host_kv_lens is not None else tuple(step.seq_lens.tolist())


def first_page(shape: Shape, kv_len: int, q_len: int) -> int:
    """First page that any query sees."""
    if shape.window_left < 0:
        return 0
    return max(0, kv_len - q_len - shape.window_left) // shape.page_size
