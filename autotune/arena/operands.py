"""Operands of one launch, made as an engine makes them, inside an arena.

A :class:`Recipe` and a column say everything; the same recipe gives the same bytes on every run on the same
kind of device, so a stored seed reproduces a failure. Dead places (page slots past a row's length, pages no
row owns) hold large finite values, so that a wrong mask or page shows in the numbers at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch

from autotune.arena.contents import (
    HOSTILE_K,
    HOSTILE_V,
    PagedContents,
    Pages,
    Values,
    bits,
    codes_of,
    dead_pages,
    draw_targets,
    host_rows,
    pattern,
    position_code,
)
from autotune.arena.kv_cache import KvCache, block_count, kv_caches
from autotune.domain.shape import KvLayout
from autotune.routes.base import Capacity, Step

if TYPE_CHECKING:
    from autotune.arena.base import Arena
    from autotune.domain.cell import Column

__all__ = [
    "HOSTILE_K",
    "HOSTILE_V",
    "TORCH_DTYPES",
    "Operands",
    "PageOrder",
    "QueryStride",
    "Recipe",
    "Values",
    "build",
    "capacity_of",
    "codes_of",
    "pages_of",
    "pool_pages",
    "position_code",
    "twin",
]

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
}
NVFP4 = "nvfp4"
# KV caches that carry a scale; a 16-bit one has none to apply.
_SCALED = ("e4m3", NVFP4)


class PageOrder(str, Enum):
    """Which pages a request owns: in order, shuffled over the pool, or at the pool's far end."""

    SEQUENTIAL = "sequential"
    SHUFFLED = "shuffled"
    FAR_END = "far_end"


class QueryStride(str, Enum):
    """``canonical`` is contiguous; ``packed_qkv`` is the query slice of a packed QKV projection."""

    CANONICAL = "canonical"
    PACKED_QKV = "packed_qkv"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one launch's operands are made of.

    Attributes:
        kv_lens: total KV length per row, padded rows included; each at least 1, or 0 with ``empty_rows``.
        table_garbage: value of page-table entries past a row's live pages.
        dead_pages: pages in the pool that no row owns; a shuffled or far-end order needs some.
        pool_pages: total pages; None: live + dead. With ``far_end`` a large number puts live pages past it.
        fill_dead: write hostile values into pages that no row owns. False leaves them untouched, so that a
            pool of many GiB costs only its live pages.
        k_scale, v_scale: dequantisation scales of an e4m3 or nvfp4 cache: it holds values divided by them.
        empty_rows: rows of length 0 are allowed: an engine that pads with 0 hands over such rows.
        interleaved_v_scales: V's block scales are stored as the trtllm-gen kernels read them; nvfp4 only.
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
    k_scale: float = 1.0
    v_scale: float = 1.0
    empty_rows: bool = False
    interleaved_v_scales: bool = False


@dataclass(slots=True, repr=False)
class Operands:
    """One launch's operands and what the oracle needs to know about them.

    Attributes:
        step: what the route gets.
        out: [rows, num_qo_heads, head_dim_vo], uninitialised.
        pages: the live pages of each row, in order.
        targets: for ``position_one_hot``, the token index each (row, query) is aligned with, -1 in an empty
            row; else None.
    """

    column: Column
    recipe: Recipe
    step: Step
    out: torch.Tensor
    pages: list[list[int]]
    targets: torch.Tensor | None = None
    _state: torch.Tensor | None = None
    _paged: PagedContents | None = None

    def __repr__(self) -> str:
        # shapes only: whoever prints operands after their memory was unmapped must not read it
        return f"Operands({self.column}, {self.recipe}, {self.step}, out {tuple(self.out.shape)})"

    @property
    def caches(self) -> tuple[KvCache, KvCache]:
        """K and V as they are stored."""
        return kv_caches(self.step, self.recipe.interleaved_v_scales)

    def unquantised(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each row in order, fp32 [kv_len, num_kv_heads, dim], before scaling and rounding.

        Drawn again from the seed rather than kept: a pool of many GiB has no second copy.
        """
        if self._paged is not None:
            yield from self._paged.rows()
            return
        assert self._state is not None
        generator = torch.Generator()
        generator.set_state(self._state)
        yield from host_rows(self.column, self.recipe.kv_lens, self.recipe.values, generator)


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
    arena: Arena,
    layout: str,
    pages: int,
    page: int,
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    what: str = "cache",
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [pages, page, heads, dim] views of the engine's pool."""
    kind = KvLayout(layout)
    hnd = kind.value.endswith("hnd")
    inner = (heads, page) if hnd else (page, heads)
    if kind in (KvLayout.SEPARATE_NHD, KvLayout.SEPARATE_HND):
        k = arena.tensor(f"k_{what}", (pages, *inner, dims[0]), dtype)
        v = arena.tensor(f"v_{what}", (pages, *inner, dims[1]), dtype)
    else:
        if dims[0] != dims[1]:
            raise ValueError(f"layout {layout} needs equal QK and VO head dims, not {dims}")
        if kind in (KvLayout.FUSED_NHD, KvLayout.FUSED_HND):
            pool = arena.tensor(f"kv_{what}", (2, pages, *inner, dims[0]), dtype)
            k, v = pool[0], pool[1]
        elif kind.packed:
            pool = arena.tensor(f"kv_{what}", (pages, *inner, 2 * dims[0]), dtype)
            k, v = pool[..., : dims[0]], pool[..., dims[0] :]
        else:
            pool = arena.tensor(f"kv_{what}", (pages, 2, *inner, dims[0]), dtype)
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


def _checked(column: Column, recipe: Recipe) -> None:
    """Refuse a recipe that does not fit the column."""
    least = 0 if recipe.empty_rows else 1
    if max(recipe.kv_lens) > column.max_context or min(recipe.kv_lens) < least:
        raise ValueError(f"kv_lens must lie in {least}..{column.max_context}, not {recipe.kv_lens}")
    if column.dtypes.kv not in (*TORCH_DTYPES, NVFP4) or column.dtypes.q not in TORCH_DTYPES:
        raise NotImplementedError(
            f"operands of q {column.dtypes.q} and KV {column.dtypes.kv} are not made; "
            f"supported: {', '.join(TORCH_DTYPES)}, and {NVFP4} KV"
        )
    if column.dtypes.kv == NVFP4 and KvLayout(column.shape.kv_layout).packed:
        raise NotImplementedError(
            f"operands of a {column.shape.kv_layout} pool with {NVFP4} KV are not made: "
            "vLLM keeps K and V of that dtype as heads of their own, with the block scales between them"
        )
    if recipe.interleaved_v_scales:
        shape = column.shape
        if column.dtypes.kv != NVFP4:
            raise ValueError(f"a {column.dtypes.kv} KV cache has no block scales to interleave")
        if shape.page_size % 4 or shape.head_dim_vo % 64:
            raise ValueError(
                "interleaved V scales need a page_size that 4 divides and a head_dim that 64 divides, "
                f"not {shape.page_size} and {shape.head_dim_vo}"
            )
    if min(recipe.k_scale, recipe.v_scale) <= 0.0:
        raise ValueError(f"k_scale and v_scale must be positive, not {recipe.k_scale}, {recipe.v_scale}")
    if (recipe.k_scale, recipe.v_scale) != (1.0, 1.0) and column.dtypes.kv not in _SCALED:
        raise ValueError(f"a {column.dtypes.kv} KV cache has no scales; they need {', '.join(_SCALED)}")


def _query(arena: Arena, column: Column, recipe: Recipe) -> torch.Tensor:
    """q as the recipe strides it; what surrounds a packed one is hostile."""
    shape, dtype = column.shape, TORCH_DTYPES[column.dtypes.q]
    rows, heads = len(recipe.kv_lens) * column.q_len, shape.num_qo_heads
    if recipe.query_stride is QueryStride.CANONICAL:
        return arena.tensor("q", (rows, heads, shape.head_dim), dtype)
    packed = arena.tensor("qkv", (rows, heads + 2 * shape.num_kv_heads, shape.head_dim), dtype)
    bits(packed).fill_(pattern(HOSTILE_K, dtype))
    return packed[:, :heads]


_Pair = tuple[torch.Tensor, torch.Tensor]


def _pool(arena: Arena, column: Column, recipe: Recipe) -> tuple[_Pair, _Pair | None]:
    """K and V of the engine's pool, and their block scales where it is an nvfp4 one."""
    shape, kv = column.shape, column.dtypes.kv
    dims = (shape.head_dim, shape.head_dim_vo)

    def pair(dims: tuple[int, int], dtype: torch.dtype, what: str) -> _Pair:
        total, page, heads = pool_pages(column, recipe), shape.page_size, shape.num_kv_heads
        return _kv_pool(arena, shape.kv_layout, total, page, heads, dims, dtype, what)

    if kv != NVFP4:
        return pair(dims, TORCH_DTYPES[kv], "cache"), None
    # scales after codes: where both lie in one arena, each has an end of its own to be guarded
    codes = pair((dims[0] // 2, dims[1] // 2), torch.uint8, "cache")
    blocks = (block_count(dims[0]), block_count(dims[1]))
    return codes, pair(blocks, torch.float8_e4m3fn, "block_scales")


def _sinks(arena: Arena, column: Column, recipe: Recipe) -> torch.Tensor | None:
    """One logit a head, of the size of what the shortest row sums up: it shows there, and hides no row."""
    if not column.shape.sinks:
        return None
    generator = torch.Generator().manual_seed((recipe.seed ^ 0x51AC) % 2**63)
    sinks = arena.tensor("sinks", (column.shape.num_qo_heads,), torch.float32)
    shortest = max(1, min(recipe.kv_lens) - column.q_len + 1)
    if column.shape.window_left >= 0:
        shortest = min(shortest, column.shape.window_left + 1)
    sinks.copy_(torch.randn(sinks.shape, generator=generator) + math.log(shortest))
    return sinks


def build(
    arena: Arena, column: Column, recipe: Recipe, device: str, *, pool: Arena | None = None
) -> Operands:
    """Make the operands of one launch inside ``arena``, the KV pool inside ``pool`` if given.

    Raises:
        ValueError: the recipe does not fit the column (a length past max_context, too few pages, scales for
            a cache that has none).
        NotImplementedError: operands of these dtypes are not made (NVFP4).
        ArenaError: memory could not be mapped.
    """
    _checked(column, recipe)
    shape, batch = column.shape, len(recipe.kv_lens)
    generator = torch.Generator().manual_seed(recipe.seed)
    counts = [pages_of(kv_len, shape.page_size) for kv_len in recipe.kv_lens]
    owned = _assign_pages(recipe, counts, pool_pages(column, recipe), generator)
    (k, v), blocks = _pool(pool or arena, column, recipe)
    q = _query(arena, column, recipe)
    page_table = arena.tensor("page_table", (batch, column.table_width), torch.int32)
    seq_lens = arena.tensor("seq_lens", (batch,), torch.int32)
    step = Step(
        q=q,
        k=k,
        v=v,
        page_table=page_table,
        seq_lens=seq_lens,
        host_kv_lens=recipe.kv_lens,
        q_len=column.q_len,
        sm_scale=shape.head_dim**-0.5,
        k_scale=recipe.k_scale,
        v_scale=recipe.v_scale,
        max_seq_len=column.max_context,
        sinks=_sinks(arena, column, recipe),
        kv_block_scales=blocks,
    )
    caches = kv_caches(step, recipe.interleaved_v_scales)
    pages = Pages.of(owned, recipe.kv_lens, device)
    if _one_stream(device):
        targets, state = _fill_on_host(column, recipe, owned, generator, q, caches)
        paged = None
    else:
        targets, paged = _fill_on_device(column, recipe, pages, generator, q, caches)
        state = None

    page_table.fill_(recipe.table_garbage)
    page_table[pages.row, pages.place] = pages.ids.to(torch.int32)
    seq_lens.copy_(torch.tensor(recipe.kv_lens, dtype=torch.int32))
    return Operands(column, recipe, step, _out(arena, column, recipe), owned, targets, state, paged)


def twin(arena: Arena, operands: Operands) -> Operands:
    """The same launch at other addresses: q, KV pool and out of its own, page table and lengths shared.

    Raises:
        ArenaError: memory could not be mapped.
    """
    column, recipe, step = operands.column, operands.recipe, operands.step
    (k, v), blocks = _pool(arena, column, recipe)
    q = _query(arena, column, recipe)
    for mine, theirs in zip(
        (q, k, v, *(blocks or ())), (step.q, step.k, step.v, *(step.kv_block_scales or ())), strict=True
    ):
        bits(mine).copy_(bits(theirs))
    step = replace(step, q=q, k=k, v=v, kv_block_scales=blocks)
    return replace(operands, step=step, out=_out(arena, column, recipe))


def _out(arena: Arena, column: Column, recipe: Recipe) -> torch.Tensor:
    shape = column.shape
    rows = len(recipe.kv_lens) * column.q_len
    return arena.tensor("out", (rows, shape.num_qo_heads, shape.head_dim_vo), TORCH_DTYPES[column.dtypes.out])


def _one_stream(device: str) -> bool:
    """The CPU keeps the stream of the seeds that are stored already."""
    return torch.device(device).type == "cpu"


def _fill_on_host(
    column: Column,
    recipe: Recipe,
    owned: list[list[int]],
    generator: torch.Generator,
    q: torch.Tensor,
    caches: tuple[KvCache, KvCache],
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Fill q and the pool; returns the targets and the generator's state before the first row."""
    page = column.shape.page_size
    # the tails of live pages are hostile whatever happens to pages that nobody owns
    live = None
    if not recipe.fill_dead:
        live = torch.tensor([page_id for ids in owned for page_id in ids], dtype=torch.int64)
    for cache in caches:
        cache.fill_hostile(live)
    queries = torch.randn(q.shape, generator=generator)
    if recipe.values is not Values.RANDOM:
        queries = torch.zeros_like(queries)
    targets = None
    if recipe.values is Values.POSITION_ONE_HOT:
        targets = torch.full((len(owned), column.q_len), -1, dtype=torch.int64)
    state = generator.get_state()
    rows = host_rows(column, recipe.kv_lens, recipe.values, generator, queries, targets)
    for kv_len, pages, drawn in zip(recipe.kv_lens, owned, rows, strict=True):
        ids = torch.tensor(pages, dtype=torch.int64).repeat_interleave(page)[:kv_len]
        slots = torch.arange(kv_len) % page
        for cache, values, exact in zip(caches, drawn, recipe.values.exact, strict=True):
            cache.write_tokens(ids, slots, values, exact)
    q.copy_(queries.to(dtype=q.dtype))
    return targets, state


def _fill_on_device(
    column: Column,
    recipe: Recipe,
    pages: Pages,
    generator: torch.Generator,
    q: torch.Tensor,
    caches: tuple[KvCache, KvCache],
) -> tuple[torch.Tensor | None, PagedContents]:
    """Fill q and the pool without a loop over rows; returns the targets and what was written."""
    contents = PagedContents(column, pages, recipe.values, recipe.seed)
    contents.write(*caches)
    if recipe.fill_dead and len(dead := dead_pages(pool_pages(column, recipe), pages.ids)):
        for cache in caches:
            cache.fill_hostile(dead)
    if recipe.values is Values.POSITION_UNIFORM:
        bits(q).zero_()
        return None, contents
    if recipe.values is Values.RANDOM:
        # on the host: q is small, and its stream must not be one of the pages'
        q.copy_(torch.randn(q.shape, generator=generator))
        return None, contents
    targets = draw_targets(column, recipe.kv_lens, generator)
    if len(pages.ids) == 0:
        bits(q).zero_()
        return targets, contents
    page, picks = column.shape.page_size, targets.clamp(min=0).to(q.device)
    # an empty last row starts past the end; what it reads is multiplied by zero
    index = (pages.starts[:, None] + picks // page).clamp(max=len(pages.ids) - 1)
    keys = caches[0].tokens(pages.ids[index], picks % page)  # [batch, q_len, kv_heads, dim]
    queries = torch.sign(keys).repeat_interleave(column.shape.group, dim=2) * 8.0
    queries *= (targets >= 0).to(q.device)[:, :, None, None]
    q.copy_(queries.flatten(0, 1))
    return targets, contents
