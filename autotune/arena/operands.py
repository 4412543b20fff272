"""Operands of one launch, made as an engine makes them, inside an arena.

A :class:`Recipe` and a column say everything; the same recipe gives the same bytes on every run on the same
kind of device, so a stored seed reproduces a failure. Dead places (page slots past a row's length, pages no
row owns) hold large finite values, so that a wrong mask or page shows in the numbers at once.
"""

from __future__ import annotations

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
    draw_targets,
    fill_dead,
    host_rows,
    pattern,
    position_code,
    quantise,
    stored,
)
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
# KV caches that carry a scale; a 16-bit one has none to apply.
_SCALED = ("e4m3",)


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
        k_scale, v_scale: dequantisation scales of an e4m3 cache: it holds the values divided by them.
        empty_rows: rows of length 0 are allowed: an engine that pads with 0 hands over such rows.
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


def _checked(column: Column, recipe: Recipe) -> None:
    """Refuse a recipe that does not fit the column."""
    least = 0 if recipe.empty_rows else 1
    if max(recipe.kv_lens) > column.max_context or min(recipe.kv_lens) < least:
        raise ValueError(f"kv_lens must lie in {least}..{column.max_context}, not {recipe.kv_lens}")
    if column.dtypes.kv not in TORCH_DTYPES or column.dtypes.q not in TORCH_DTYPES:
        raise NotImplementedError(
            f"operands of q {column.dtypes.q} and KV {column.dtypes.kv} are not made; "
            f"supported: {', '.join(TORCH_DTYPES)}"
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


def _pool(arena: Arena, column: Column, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    shape = column.shape
    return _kv_pool(
        arena,
        shape.kv_layout,
        pool_pages(column, recipe),
        shape.page_size,
        shape.num_kv_heads,
        (shape.head_dim, shape.head_dim_vo),
        TORCH_DTYPES[column.dtypes.kv],
    )


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
    k, v = _pool(pool or arena, column, recipe)
    q = _query(arena, column, recipe)
    pages = Pages.of(owned, recipe.kv_lens, device)
    if _one_stream(device):
        targets, state = _fill_on_host(column, recipe, owned, generator, q, k, v)
        paged = None
    else:
        targets, paged = _fill_on_device(column, recipe, pages, generator, q, k, v)
        state = None

    page_table = arena.tensor("page_table", (batch, column.table_width), torch.int32)
    page_table.fill_(recipe.table_garbage)
    page_table[pages.row, pages.place] = pages.ids.to(torch.int32)
    seq_lens = arena.tensor("seq_lens", (batch,), torch.int32)
    seq_lens.copy_(torch.tensor(recipe.kv_lens, dtype=torch.int32))
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
    )
    return Operands(column, recipe, step, _out(arena, column, recipe), owned, targets, state, paged)


def twin(arena: Arena, operands: Operands) -> Operands:
    """The same launch at other addresses: q, KV pool and out of its own, page table and lengths shared.

    Raises:
        ArenaError: memory could not be mapped.
    """
    column, recipe, step = operands.column, operands.recipe, operands.step
    k, v = _pool(arena, column, recipe)
    q = _query(arena, column, recipe)
    for mine, theirs in ((k, step.k), (v, step.v), (q, step.q)):
        bits(mine).copy_(bits(theirs))
    return replace(operands, step=replace(step, q=q, k=k, v=v), out=_out(arena, column, recipe))


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
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Fill q and the pool; returns the targets and the generator's state before the first row."""
    page, dtype = column.shape.page_size, k.dtype
    hostile_k = stored(HOSTILE_K, recipe.k_scale, dtype)
    hostile_v = stored(HOSTILE_V, recipe.v_scale, dtype)
    if recipe.fill_dead:
        k.fill_(hostile_k)
        v.fill_(hostile_v)
    else:  # the tails of live pages are hostile all the same
        live = torch.tensor([page_id for ids in owned for page_id in ids], dtype=torch.int64)
        k[live] = hostile_k
        v[live] = hostile_v
    queries = torch.randn(q.shape, generator=generator)
    if recipe.values is not Values.RANDOM:
        queries = torch.zeros_like(queries)
    targets = None
    if recipe.values is Values.POSITION_ONE_HOT:
        targets = torch.full((len(owned), column.q_len), -1, dtype=torch.int64)
    state = generator.get_state()
    rows = host_rows(column, recipe.kv_lens, recipe.values, generator, queries, targets)
    for kv_len, pages, (keys, values) in zip(recipe.kv_lens, owned, rows, strict=True):
        slots = torch.tensor(pages, dtype=torch.int64).repeat_interleave(page)[:kv_len]
        offsets = torch.arange(kv_len) % page
        k[slots, offsets] = quantise(keys, recipe.k_scale, dtype)
        v[slots, offsets] = quantise(values, recipe.v_scale, dtype)
    q.copy_(queries.to(dtype=q.dtype))
    return targets, state


def _fill_on_device(
    column: Column,
    recipe: Recipe,
    pages: Pages,
    generator: torch.Generator,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor | None, PagedContents]:
    """Fill q and the pool without a loop over rows; returns the targets and what was written."""
    contents = PagedContents(column, pages, recipe.values, recipe.seed)
    contents.write(k, v, recipe.k_scale, recipe.v_scale)
    if recipe.fill_dead:
        fill_dead(k, v, pages.ids, recipe.k_scale, recipe.v_scale)
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
    keys = bits(k)[pages.ids[index], picks % page].view(k.dtype)  # [batch, q_len, kv_heads, dim]
    queries = torch.sign(keys.to(torch.float32)).repeat_interleave(column.shape.group, dim=2) * 8.0
    queries *= (targets >= 0).to(q.device)[:, :, None, None]
    q.copy_(queries.flatten(0, 1))
    return targets, contents
