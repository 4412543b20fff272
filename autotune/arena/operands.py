"""Operands of one launch, made as an engine makes them, inside an arena.

A :class:`Recipe` and a column say everything; the same recipe gives the same bytes on every run, so a
stored seed reproduces a failure. Dead places (page slots past a row's length, pages no row owns) hold
large finite values, so that a wrong mask or page shows in the numbers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from autotune.domain.shape import KvLayout
from autotune.routes.base import Capacity, Step

if TYPE_CHECKING:
    from autotune.arena.base import Arena
    from autotune.domain.cell import Column

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
}

# A dead K slot gives a logit that outweighs every live one, a dead V slot a value far outside the live
# range (standard normal); both stay finite in every dtype (e4m3 ends at 448).
HOSTILE_K = 32.0
HOSTILE_V = 320.0


class PageOrder(str, Enum):
    """Which pages a request owns: in order, shuffled over the pool, or at the pool's far end."""

    SEQUENTIAL = "sequential"
    SHUFFLED = "shuffled"
    FAR_END = "far_end"


class Values(str, Enum):
    """Contents of q, K and V."""

    RANDOM = "random"
    # V of token t is a code of (row, t) and q is zero: the output is the mean of the visible codes.
    POSITION_UNIFORM = "position_uniform"
    # V as above, each query is aligned with the key of one token: the output is that token's code.
    POSITION_ONE_HOT = "position_one_hot"


class QueryStride(str, Enum):
    """``canonical`` is contiguous; ``packed_qkv`` is the query slice of a packed QKV projection."""

    CANONICAL = "canonical"
    PACKED_QKV = "packed_qkv"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one launch's operands are made of.

    Attributes:
        kv_lens: total KV length per row, padded rows included; each at least 1.
        table_garbage: value of page-table entries past a row's live pages.
        dead_pages: pages in the pool that no row owns; a shuffled or far-end order needs some.
        pool_pages: total pages; None: live + dead. With ``far_end`` a large number puts live pages past it.
        fill_dead: write hostile values into pages that no row owns. False leaves them untouched, so that a
            pool of many GiB costs only its live pages where memory is mapped on first touch.
    """

    kv_lens: tuple[int, ...]
    seed: int
    order: PageOrder = PageOrder.SHUFFLED
    values: Values = Values.RANDOM
    query_stride: QueryStride = QueryStride.CANONICAL
    table_garbage: int = 0
    dead_pages: int = 3
    pool_pages: int | None = None
    fill_dead: bool = True


@dataclass(slots=True)
class Operands:
    """One launch's operands and what the oracle needs to know about them.

    Attributes:
        step: what the route gets.
        out: [rows, num_qo_heads, head_dim_vo], uninitialised.
        pages: the live pages of each row, in order.
        targets: for ``position_one_hot``, the token index each (row, query) is aligned with; else None.
    """

    column: Column
    recipe: Recipe
    step: Step
    out: torch.Tensor
    pages: list[list[int]]
    targets: torch.Tensor | None = None


def pages_of(kv_len: int, page_size: int) -> int:
    """Live pages of a row with ``kv_len`` tokens."""
    return -(-kv_len // page_size)


def pool_pages(column: Column, recipe: Recipe) -> int:
    """Pages in the pool that ``recipe`` asks for."""
    if recipe.pool_pages is not None:
        return recipe.pool_pages
    live = sum(pages_of(kv_len, column.shape.page_size) for kv_len in recipe.kv_lens)
    return live + recipe.dead_pages


def capacity_of(column: Column, recipe: Recipe, device: str, max_batch_size: int | None = None) -> Capacity:
    """The capacity at which a session for ``recipe`` is opened."""
    return Capacity(
        column=column,
        max_batch_size=max_batch_size or max(column.batch_size, len(recipe.kv_lens)),
        num_pages=pool_pages(column, recipe),
        device=device,
    )


def _kv_pool(
    arena: Arena, layout: str, pages: int, page: int, heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [pages, page, heads, dim] views of the engine's pool."""
    kind = KvLayout(layout)
    hnd = kind.value.endswith("hnd")
    inner = (heads, page) if hnd else (page, heads)
    if kind in (KvLayout.SEPARATE_NHD, KvLayout.SEPARATE_HND):
        k = arena.tensor("k_cache", (pages, *inner, dims[0]), dtype)
        v = arena.tensor("v_cache", (pages, *inner, dims[1]), dtype)
    else:
        if dims[0] != dims[1]:
            raise ValueError(f"layout {layout} needs equal QK and VO head dims, not {dims}")
        if kind in (KvLayout.FUSED_NHD, KvLayout.FUSED_HND):
            pool = arena.tensor("kv_cache", (2, pages, *inner, dims[0]), dtype)
            k, v = pool[0], pool[1]
        else:
            pool = arena.tensor("kv_cache", (pages, 2, *inner, dims[0]), dtype)
            k, v = pool[:, 0], pool[:, 1]
    return (k.transpose(1, 2), v.transpose(1, 2)) if hnd else (k, v)


def _assign_pages(
    recipe: Recipe, counts: list[int], total: int, generator: torch.Generator
) -> list[list[int]]:
    live = sum(counts)
    if live > total:
        raise ValueError(f"{live} live pages do not fit into a pool of {total}")
    if recipe.order is PageOrder.SEQUENTIAL:
        ids = list(range(live))
    elif recipe.order is PageOrder.FAR_END:
        ids = [total - live + i for i in torch.randperm(live, generator=generator).tolist()]
    elif total > 4 * live + 64:  # a pool far larger than its live part: sample, do not permute it all
        drawn = torch.randint(0, total, (2 * live + 64,), generator=generator).tolist()
        ids = list(dict.fromkeys(drawn))[:live]
    else:
        ids = torch.randperm(total, generator=generator)[:live].tolist()
    owned, start = [], 0
    for count in counts:
        owned.append(ids[start : start + count])
        start += count
    return owned


def position_code(row: int, tokens: torch.Tensor, dim: int) -> torch.Tensor:
    """V codes [len(tokens), dim]: small integers, exact in every dtype (magnitude at most 8).

    Element d of token t is one signed digit of a mix of (row, t, d), so two tokens, rows or pages that are
    confused differ in about 16 of 17 elements.
    """
    d = torch.arange(dim, dtype=torch.int64)
    mixed = (tokens.to(torch.int64)[:, None] * 7919 + row * 104729 + 31) * (2 * d[None, :] + 1)
    mixed = mixed ^ (mixed >> 7) ^ (mixed >> 13)
    return (mixed % 17 - 8).to(torch.float32)


def build(
    arena: Arena, column: Column, recipe: Recipe, device: str, *, pool: Arena | None = None
) -> Operands:
    """Make the operands of one launch inside ``arena``, the KV pool inside ``pool`` if given.

    Raises:
        ValueError: the recipe does not fit the column (a length past max_context, too few pages).
        ArenaError: memory could not be mapped.
    """
    shape, batch = column.shape, len(recipe.kv_lens)
    page, width, total = shape.page_size, column.table_width, pool_pages(column, recipe)
    if max(recipe.kv_lens) > column.max_context or min(recipe.kv_lens) < 1:
        raise ValueError(f"kv_lens must lie in 1..{column.max_context}, not {recipe.kv_lens}")
    generator = torch.Generator().manual_seed(recipe.seed)
    q_dtype, kv_dtype = TORCH_DTYPES[column.dtypes.q], TORCH_DTYPES[column.dtypes.kv]
    rows, heads, kv_heads = batch * column.q_len, shape.num_qo_heads, shape.num_kv_heads

    counts = [pages_of(kv_len, page) for kv_len in recipe.kv_lens]
    owned = _assign_pages(recipe, counts, total, generator)
    k, v = _kv_pool(
        pool or arena, shape.kv_layout, total, page, kv_heads, (shape.head_dim, shape.head_dim_vo), kv_dtype
    )
    if recipe.fill_dead:
        k.fill_(HOSTILE_K)
        v.fill_(HOSTILE_V)
    else:  # the tails of live pages are hostile all the same
        live = torch.tensor([page_id for ids in owned for page_id in ids], device=device)
        k[live] = HOSTILE_K
        v[live] = HOSTILE_V

    if recipe.query_stride is QueryStride.PACKED_QKV:
        packed = arena.tensor("qkv", (rows, heads + 2 * kv_heads, shape.head_dim), q_dtype)
        packed.fill_(HOSTILE_K)
        q = packed[:, :heads]
    else:
        q = arena.tensor("q", (rows, heads, shape.head_dim), q_dtype)
    queries = torch.randn((rows, heads, shape.head_dim), generator=generator)
    targets = None
    if recipe.values is Values.POSITION_UNIFORM:
        queries = torch.zeros_like(queries)

    if recipe.values is Values.POSITION_ONE_HOT:
        targets = torch.empty((batch, column.q_len), dtype=torch.int64)
    for row, (kv_len, pages) in enumerate(zip(recipe.kv_lens, owned, strict=True)):
        keys = torch.randn((kv_len, kv_heads, shape.head_dim), generator=generator)
        if recipe.values is Values.RANDOM:
            values = torch.randn((kv_len, kv_heads, shape.head_dim_vo), generator=generator)
        else:
            code = position_code(row, torch.arange(kv_len), shape.head_dim_vo)
            # each KV head has a code of its own: head h is rolled by h, so confused heads show
            values = torch.stack([code.roll(h, dims=1) for h in range(kv_heads)], dim=1)
        if recipe.values is Values.POSITION_ONE_HOT:
            assert targets is not None
            # +-1 keys: k.k = head_dim, any other pair stays near sqrt(head_dim); the query is scaled so
            # that the target's logit leads by far more than any dtype resolves
            keys = torch.sign(keys)
            keys[keys == 0] = 1.0
            for i in range(column.q_len):
                visible = max(1, kv_len - column.q_len + i + 1)
                first = max(0, visible - 1 - shape.window_left) if shape.window_left >= 0 else 0
                span = visible - first
                # the last visible token tells a mask shifted by one; others are drawn
                pick = (
                    visible - 1
                    if (row + i) % 2 == 0
                    else first + int(torch.randint(0, span, (1,), generator=generator))
                )
                targets[row, i] = pick
                per_head = keys[pick].repeat_interleave(shape.group, dim=0)
                queries[row * column.q_len + i] = per_head * 8.0
        slots = torch.tensor(pages).repeat_interleave(page)[:kv_len]
        offsets = torch.arange(kv_len) % page
        k[slots.to(device), offsets.to(device)] = keys.to(device=device, dtype=kv_dtype)
        v[slots.to(device), offsets.to(device)] = values.to(device=device, dtype=kv_dtype)
    q.copy_(queries.to(device=device, dtype=q_dtype))

    page_table = arena.tensor("page_table", (batch, width), torch.int32)
    table = torch.full((batch, width), recipe.table_garbage, dtype=torch.int32)
    for row, pages in enumerate(owned):
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    page_table.copy_(table)
    seq_lens = arena.tensor("seq_lens", (batch,), torch.int32)
    seq_lens.copy_(torch.tensor(recipe.kv_lens, dtype=torch.int32))
    out = arena.tensor("out", (rows, heads, shape.head_dim_vo), TORCH_DTYPES[column.dtypes.out])
    step = Step(
        q=q,
        k=k,
        v=v,
        page_table=page_table,
        seq_lens=seq_lens,
        host_kv_lens=recipe.kv_lens,
        q_len=column.q_len,
        sm_scale=shape.head_dim**-0.5,
        k_scale=1.0,
        v_scale=1.0,
        max_seq_len=column.max_context,
    )
    return Operands(column, recipe, step, out, owned, targets)
