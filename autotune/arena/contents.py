"""What q, K and V of a launch hold: drawn from a seed, on the host row by row, on a GPU page by page.

The host's draw is one sequential stream, so that a seed stored by an older version still gives the same
bytes. An accelerator draws chunks of pages, each from a seed of its own: any part can be drawn again without
the rest, and nothing larger than a chunk is ever held in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autotune.arena.kv_cache import KvCache
    from autotune.domain.cell import Column

# A dead K slot gives a logit that outweighs every live one, a dead V slot a value far outside the live
# range (standard normal); both stay finite in every dtype (e4m3 ends at 448).
HOSTILE_K = 32.0
HOSTILE_V = 320.0
# Elements of one chunk: 128 MiB in fp32, enough to keep an accelerator busier than its launches.
CHUNK_ELEMENTS = 2**25

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Values(str, Enum):
    """Contents of q, K and V."""

    RANDOM = "random"
    # V of token t is a code of (row, t) and q is zero: the output is the mean of the visible codes.
    POSITION_UNIFORM = "position_uniform"
    # V as above, each query is aligned with the key of one token: the output is that token's code.
    POSITION_ONE_HOT = "position_one_hot"

    @property
    def exact(self) -> tuple[bool, bool]:
        """Whether K, and whether V, holds codes that every cache dtype keeps exactly."""
        return self is Values.POSITION_ONE_HOT, self is not Values.RANDOM


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as integers of its element size, any strides: comparable bit by bit, NaNs included, and
    indexed and filled everywhere, for which float8 has no kernels."""
    return tensor.view(_INTS[tensor.element_size()])


def pattern(value: float, dtype: torch.dtype) -> int:
    """``value`` in ``dtype`` as an integer of its element size."""
    return int(bits(torch.tensor(value).to(dtype)))


def stored(value: float, scale: float, dtype: torch.dtype) -> float:
    """``value`` in the units in which a cache of ``scale`` keeps it, within the dtype's range."""
    largest = torch.finfo(dtype).max
    return max(-largest, min(largest, value / scale))


def quantise(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values as a cache with ``scale`` stores them; saturating, since torch's cast to e4m3 is not."""
    if scale != 1.0:
        largest = torch.finfo(dtype).max
        values = (values / scale).clamp_(-largest, largest)
    return values.to(dtype)


# Codes of a position are small integers. e2m1 holds only some of them.
CODES = tuple(range(-8, 9))
NVFP4_CODES = (-6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6)


def codes_of(kv_dtype: str) -> tuple[int, ...]:
    """The codes that a KV cache of ``kv_dtype`` holds exactly."""
    return NVFP4_CODES if kv_dtype == "nvfp4" else CODES


def position_code(
    row: int | torch.Tensor, tokens: torch.Tensor, dim: int, codes: tuple[int, ...] = CODES
) -> torch.Tensor:
    """V codes [len(tokens), dim]: small integers, exact in the cache's dtype (magnitude at most 8).

    Element d of token t is one of ``codes`` by a mix of (row, t, d), so two tokens, rows or pages that are
    confused differ in about 16 of 17 elements (10 of 11 in nvfp4).

    Args:
        row: the request, or one for each token.
    """
    d = torch.arange(dim, dtype=torch.int64, device=tokens.device)
    rows = row[:, None] if isinstance(row, torch.Tensor) else row
    mixed = (tokens.to(torch.int64)[:, None] * 7919 + rows * 104729 + 31) * (2 * d[None, :] + 1)
    mixed = mixed ^ (mixed >> 7) ^ (mixed >> 13)
    return torch.tensor(codes, dtype=torch.float32, device=tokens.device)[mixed % len(codes)]


def visible_span(kv_len: int, q_len: int, i: int, window_left: int) -> tuple[int, int]:
    """Tokens [first, end) that query ``i`` of a request sees; a row shorter than q_len sees its first."""
    end = max(1, kv_len - q_len + i + 1)
    return (max(0, end - 1 - window_left) if window_left >= 0 else 0), end


def host_rows(
    column: Column,
    kv_lens: tuple[int, ...],
    kind: Values,
    generator: torch.Generator,
    queries: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each request in order, fp32 [kv_len, kv_heads, dim], from one sequential stream.

    For one-hot contents each query's target is drawn on the way and written into ``queries`` and ``targets``
    where they are given; the stream is the same without them.
    """
    shape = column.shape
    for row, kv_len in enumerate(kv_lens):
        keys = torch.randn((kv_len, shape.num_kv_heads, shape.head_dim), generator=generator)
        if kind is Values.RANDOM:
            values = torch.randn((kv_len, shape.num_kv_heads, shape.head_dim_vo), generator=generator)
        else:
            code = position_code(row, torch.arange(kv_len), shape.head_dim_vo, codes_of(column.dtypes.kv))
            # each KV head has a code of its own: head h is rolled by h, so confused heads show
            values = torch.stack([code.roll(h, dims=1) for h in range(shape.num_kv_heads)], dim=1)
        if kind is Values.POSITION_ONE_HOT:
            # +-1 keys: k.k = head_dim, any other pair stays near sqrt(head_dim); the query is scaled so
            # that the target's logit leads by far more than any dtype resolves
            keys = torch.sign(keys)
            keys[keys == 0] = 1.0
            for i in range(column.q_len if kv_len else 0):
                first, end = visible_span(kv_len, column.q_len, i, shape.window_left)
                # the last visible token tells a mask shifted by one; others are drawn
                pick = (
                    end - 1
                    if (row + i) % 2 == 0
                    else first + int(torch.randint(0, end - first, (1,), generator=generator))
                )
                if targets is not None:
                    targets[row, i] = pick
                if queries is not None:
                    per_head = keys[pick].repeat_interleave(shape.group, dim=0)
                    queries[row * column.q_len + i] = per_head * 8.0
        yield keys, values


def draw_targets(column: Column, kv_lens: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One-hot targets int64 [batch, q_len] for all requests at once; -1 in rows without tokens."""
    lens = torch.tensor(kv_lens, dtype=torch.int64)[:, None]
    i = torch.arange(column.q_len, dtype=torch.int64)[None, :]
    end = (lens - column.q_len + i + 1).clamp(min=1)
    window = column.shape.window_left
    first = (end - 1 - window).clamp(min=0) if window >= 0 else torch.zeros_like(end)
    drawn = torch.rand(end.shape, dtype=torch.float64, generator=generator)
    pick = first + (drawn * (end - first)).floor().to(torch.int64).clamp(max=end - first - 1)
    last = (torch.arange(len(kv_lens))[:, None] + i) % 2 == 0
    return torch.where(lens == 0, -1, torch.where(last, end - 1, pick))


@dataclass(frozen=True, slots=True)
class Pages:
    """The live pages of all requests, request by request, on one device.

    Attributes:
        ids: int64 [live], place in the pool.
        row, place: int64 [live], the request that owns a page and the page's place in it.
        starts: int64 [batch], index of each request's first page.
        lens: int64 [batch], total KV lengths.
    """

    ids: torch.Tensor
    row: torch.Tensor
    place: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def of(cls, owned: list[list[int]], kv_lens: tuple[int, ...], device: str) -> Pages:
        """From each request's page ids."""
        counts = torch.tensor([len(ids) for ids in owned], dtype=torch.int64)
        starts = torch.cumsum(counts, 0) - counts
        row = torch.repeat_interleave(torch.arange(len(owned)), counts)
        place = torch.arange(len(row)) - starts[row]
        ids = torch.tensor([page for pages in owned for page in pages], dtype=torch.int64)
        lens = torch.tensor(kv_lens, dtype=torch.int64)
        return cls(*(tensor.to(device) for tensor in (ids, row, place, starts, lens)))


@dataclass(frozen=True, slots=True)
class PagedContents:
    """K and V drawn page by page on the device of ``pages``; the same seed gives the same values."""

    column: Column
    pages: Pages
    kind: Values
    seed: int

    @property
    def chunk_pages(self) -> int:
        """Pages drawn together; fixed by the column, since the values depend on it."""
        shape = self.column.shape
        page = shape.page_size * shape.num_kv_heads * max(shape.head_dim, shape.head_dim_vo)
        return max(1, CHUNK_ELEMENTS // page)

    def chunk(self, index: int) -> tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chunk ``index``: which pages, K and V fp32 [pages, page_size, kv_heads, dim], live slots
        bool [pages, page_size]."""
        shape, pages = self.column.shape, self.pages
        where = slice(index * self.chunk_pages, min(len(pages.ids), (index + 1) * self.chunk_pages))
        device = pages.ids.device
        # one seed a chunk: any row can be drawn again without those before it
        seed = (self.seed * 0x9E3779B97F4A7C15 + index + 1) % 2**63
        generator = torch.Generator(device=device).manual_seed(seed)
        row = pages.row[where]
        slots = torch.arange(shape.page_size, device=device)
        tokens = pages.place[where][:, None] * shape.page_size + slots
        live = tokens < pages.lens[row][:, None]
        inner = (len(row), shape.page_size, shape.num_kv_heads)
        keys = torch.randn((*inner, shape.head_dim), generator=generator, device=device)
        if self.kind is Values.RANDOM:
            values = torch.randn((*inner, shape.head_dim_vo), generator=generator, device=device)
        else:
            flat = row[:, None].expand_as(tokens).reshape(-1)
            codes = codes_of(self.column.dtypes.kv)
            code = position_code(flat, tokens.reshape(-1), shape.head_dim_vo, codes)
            head = torch.arange(shape.num_kv_heads, device=device)[:, None]
            rolled = (torch.arange(shape.head_dim_vo, device=device)[None, :] - head) % shape.head_dim_vo
            values = code[:, rolled].view(*inner, shape.head_dim_vo)
        if self.kind is Values.POSITION_ONE_HOT:
            keys = torch.where(keys < 0, -1.0, 1.0)
        return where, keys, values, live

    def write(self, k: KvCache, v: KvCache) -> None:
        """Write every live page once, dead slots hostile."""
        for index in range(-(-len(self.pages.ids) // self.chunk_pages)):
            where, keys, values, live = self.chunk(index)
            for cache, data, exact in zip((k, v), (keys, values), self.kind.exact, strict=True):
                cache.write_pages(self.pages.ids[where], data, ~live, exact)

    def rows(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each request in order, fp32 [kv_len, kv_heads, dim], as they were before quantising."""
        shape = self.column.shape
        counts = torch.bincount(self.pages.row, minlength=len(self.pages.lens)).tolist()
        held, drawn = -1, (torch.empty(0), torch.empty(0))
        start = 0
        for count, kv_len in zip(counts, self.pages.lens.tolist(), strict=True):
            parts: list[tuple[torch.Tensor, torch.Tensor]] = []
            page = start
            while page < start + count:
                index = page // self.chunk_pages
                if index != held:
                    _, keys, values, _ = self.chunk(index)
                    held, drawn = index, (keys, values)
                first = page - index * self.chunk_pages
                last = min(first + start + count - page, self.chunk_pages)
                parts.append((drawn[0][first:last], drawn[1][first:last]))
                page += last - first
            start += count
            if not parts:
                device = self.pages.ids.device
                yield (
                    torch.empty((0, shape.num_kv_heads, shape.head_dim), device=device),
                    torch.empty((0, shape.num_kv_heads, shape.head_dim_vo), device=device),
                )
                continue
            keys, values = (torch.cat(part).flatten(0, 1)[:kv_len] for part in zip(*parts, strict=True))
            yield keys, values


def dead_pages(total: int, live: torch.Tensor) -> torch.Tensor:
    """Ids of the pages of a pool of ``total`` that ``live`` does not name."""
    dead = torch.ones(total, dtype=torch.bool, device=live.device)
    dead[live] = False
    return dead.nonzero().flatten()
