"""Attention as the kernels behind the launchers define it, on the CPU.

Read from the source (see ``params``), or where that ends at a compiled kernel:

- Query i of a request sees ``seq_len - q_len + i + 1`` tokens, less what its window hides. The decode
  launcher takes ``max_q_len`` queries a request unless it is given cumulative lengths.
- A row that sees no token is written as zeros. What the kernels write there is not known; engines pad with
  such rows and drop what comes out.
- A decode launch works on ``max_kv_len`` tokens of a request, in parts: what lies past them nobody reads.
  FlashInfer documents the bound as one; what a kernel does past it is not known.
- A request's parts are merged by the CTA that arrives last, by a counter that is zero between launches. It
  merges whatever the scratch holds at that time. On a GPU some shapes merge without counters and scratch, in
  a cluster's shared memory; here every decode launch with more than one part uses them.
- ``cum_seq_lens_kv`` is read and not used: SGLang passes tokens and vLLM pages, and both are right.
- Table entries past the live pages and slots past a length are not read. Kernels load whole tiles: whether
  garbage there matters, only a GPU can tell.
- TMA fills with zeros what lies outside a tensor. Here that is read, and faults in guarded memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from autotune.routes.flashinfer.emulation import memory
from autotune.routes.flashinfer.emulation.arguments import ORDERS, named
from autotune.routes.flashinfer.emulation.params import LOG2E, Params, derive

# Magnitudes of the e2m1 codes 0..7; bit 3 is the sign, the low half of a byte comes first.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_BLOCK = 16


class Launchers:
    """Stands for the compiled module ``fmha_gen``."""

    def __getattr__(self, function: str) -> Callable[..., None]:
        if function not in ORDERS:
            raise AttributeError(f"{function} is not emulated, only {' and '.join(ORDERS)}")
        return lambda *args: launch(function, args)


def launch(function: str, args: Sequence[Any]) -> None:
    """One call of a launcher, done when it returns.

    Raises:
        LauncherError: it refuses the arguments.
    """
    params = derive(named(function, args))
    lens = memory.integers(params.seq_lens, params.batch)
    offsets = [request * params.max_q_len for request in range(params.batch + 1)]
    if params.cum_q:
        offsets = memory.integers(params.cum_q, params.batch + 1)
    if params.cum_kv:
        memory.integers(params.cum_kv, params.batch + 1)
    for request, kv_len in enumerate(lens):
        first, q_len = offsets[request], offsets[request + 1] - offsets[request]
        # the grid is made for max_q_len queries a request
        _attend(params, request, first, q_len, min(q_len, params.max_q_len), kv_len)


def _attend(params: Params, request: int, first: int, q_len: int, count: int, kv_len: int) -> None:
    """``count`` of a request's ``q_len`` queries, rows from ``first`` on."""
    if count <= 0:
        return
    reach = kv_len if params.context else min(kv_len, params.max_kv_len)
    ends = [kv_len - q_len + i + 1 if params.causal else kv_len for i in range(count)]
    starts = [0 if params.window is None else max(0, end - params.window) for end in ends]
    start, end = starts[0] // params.page_size * params.page_size, max(0, min(reach, max(ends)))
    q = _queries(params, first, count)  # [kv_heads, count x group, head_dim]
    k, v = _tokens(params, request, start, end)  # [kv_heads, tokens, head_dim]
    logits = torch.matmul(q, k.transpose(1, 2)) * _host_or(params.scale_log2, params.scale_log2_at)
    at = torch.arange(start, max(start, end))
    hidden = (at < torch.tensor(starts)[:, None]) | (at >= torch.tensor(ends)[:, None])
    hidden = hidden.repeat_interleave(params.group, dim=0)
    logits.masked_fill_(hidden, -torch.inf)
    # what no query sees is not multiplied: NaN times zero is NaN
    v = v.masked_fill(hidden.all(dim=0)[None, :, None], 0.0)
    if params.splits == 1:
        top, total, value = _part(logits, v)
        _store(
            params,
            first,
            count,
            _merged(params, count, top[..., None], total[..., None], value[..., None, :]),
        )
        return
    each = -(-params.max_kv_len // params.splits)
    cuts = [min(max(0, part * each - start), logits.shape[-1]) for part in range(params.splits)]
    cuts.append(logits.shape[-1])
    parts = [_part(logits[..., low:high], v[:, low:high]) for low, high in pairwise(cuts)]
    _merge_by_counters(params, request, first, count, parts)


def _host_or(value: float, address: int) -> float:
    """The device's value has priority over the host's."""
    return memory.real(address) if address else value


def _queries(params: Params, first: int, count: int) -> torch.Tensor:
    """[kv_heads, count x group, head_dim], fp32."""
    size = params.q_dtype.itemsize
    view = memory.strided(
        params.q + first * params.q_stride_tokens * size,
        params.q_dtype,
        (count, params.qo_heads, params.head_dim),
        (params.q_stride_tokens, params.q_stride_heads, 1),
    )
    q = view.to(torch.float32).view(count, params.kv_heads, params.group, params.head_dim)
    return q.transpose(0, 1).reshape(params.kv_heads, count * params.group, params.head_dim)


def _tokens(params: Params, request: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the tokens [start, end) of a request, fp32 [kv_heads, tokens, head_dim]; ``start`` begins a
    page. V is read with K's strides."""
    page = params.page_size
    row = params.tables + 4 * request * params.table_width
    low = start // page
    ids = memory.integers(row + 4 * low, -(-end // page) - low)
    count = max(0, end - start)
    dim = params.head_dim // 2 if params.kv_dtype == torch.uint8 else params.head_dim
    size = params.kv_dtype.itemsize
    found = []
    for place, base in enumerate((params.k, params.v)):
        stored = torch.empty((params.kv_heads, count, dim), dtype=params.kv_dtype)
        scales = torch.empty((params.kv_heads, count, params.head_dim // _BLOCK))
        for index, page_id in enumerate(ids):
            used = min(page, count - index * page)
            here = slice(index * page, index * page + used)
            stored[:, here] = memory.strided(
                base + page_id * params.stride_pages * size,
                params.kv_dtype,
                (params.kv_heads, used, dim),
                (params.stride_heads, params.stride_tokens, 1),
            )
            if params.block_scales is not None:
                scales[:, here] = _page_scales(params, page_id, used, interleaved=place == 1)
        found.append(_dequantised(stored, scales) if params.block_scales else stored.to(torch.float32))
    return found[0], found[1]


def _page_scales(params: Params, page_id: int, used: int, *, interleaved: bool) -> torch.Tensor:
    """Block scales of a page's first tokens, fp32 [kv_heads, used, head_dim / 16].

    A page and head's scales are contiguous. V's are interleaved by four tokens: scale s of token t lies at
    (t // 4) 4 S + 4 s + t % 4.
    """
    where = params.block_scales
    assert where is not None
    count = params.head_dim // _BLOCK
    tokens = -(-used // 4) * 4 if interleaved else used
    view = memory.strided(
        (where.v if interleaved else where.k) + page_id * where.stride_pages,
        torch.float8_e4m3fn,
        (params.kv_heads, tokens, count),
        (where.stride_heads, count, 1),
    )
    scales = view.to(torch.float32)
    if interleaved:
        grouped = scales.reshape(params.kv_heads, tokens // 4, count, 4)
        scales = grouped.transpose(2, 3).reshape(params.kv_heads, tokens, count)
    return scales[:, :used]


def _dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = codes.to(torch.int64)
    values = _E2M1[torch.stack((wide & 15, wide >> 4), dim=-1)]
    return (values.view(*scales.shape, _BLOCK) * scales[..., None]).flatten(-2)


def _part(logits: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest logit and sum of weights, each [heads, rows], and weighted values [heads, rows, head_dim]."""
    if logits.shape[-1] == 0:
        top = torch.full(logits.shape[:-1], -torch.inf)
        return top, torch.zeros_like(top), torch.zeros((*top.shape, v.shape[-1]))
    top = logits.amax(dim=-1)
    weights = torch.exp2(logits - torch.where(top == -torch.inf, 0.0, top)[..., None])
    return top, weights.sum(dim=-1), torch.matmul(weights, v)


def _merged(
    params: Params, count: int, top: torch.Tensor, total: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Parts along the last dimension of ``top`` to results fp32 [kv_heads, count x group, head_dim]."""
    highest = top.amax(dim=-1)
    sinks = None
    if params.sinks:
        sinks = memory.flat(params.sinks, torch.float32, params.qo_heads) * LOG2E
        sinks = sinks.view(params.kv_heads, 1, params.group)
        sinks = sinks.expand(-1, count, -1).reshape(highest.shape)
        highest = torch.maximum(highest, sinks)
    base = torch.where(highest == -torch.inf, 0.0, highest)
    shrink = torch.exp2(top - base[..., None])
    weight = (total * shrink).sum(dim=-1)
    if sinks is not None:
        weight = weight + torch.exp2(sinks - base)
    result = (value * shrink[..., None]).sum(dim=-2)
    # NaN stays NaN; only a row that saw nothing is zero
    empty = (weight == 0.0)[..., None]
    scale = _host_or(params.output_scale, params.output_scale_at)
    return torch.where(empty, 0.0, result / torch.where(empty, 1.0, weight[..., None])) * scale


def _store(params: Params, first: int, count: int, result: torch.Tensor, heads: Sequence[int] = ()) -> None:
    """Write a request's rows, or of them some query heads only. ``out`` is taken to be contiguous."""
    shape = (params.kv_heads, count, params.group, params.head_dim)
    rows = result.view(shape).transpose(0, 1).reshape(count, params.qo_heads, params.head_dim)
    if params.out_dtype == torch.float8_e4m3fn:
        largest = torch.finfo(params.out_dtype).max
        rows = rows.clamp(-largest, largest)
    width = params.qo_heads * params.head_dim
    out = memory.strided(
        params.out + first * width * params.out_dtype.itemsize,
        params.out_dtype,
        rows.shape,
        (width, params.head_dim, 1),
    )
    rows = rows.to(params.out_dtype)
    if not heads:
        out.copy_(rows)
    for head in heads:
        out[:, head] = rows[:, head]


def _merge_by_counters(
    params: Params,
    request: int,
    first: int,
    count: int,
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> None:
    """The parts arrive in order, one counter for each query head. Each adds one to it, and the one that
    finds the others' number there merges what the scratch holds and sets it back to zero."""
    heads, rows = params.qo_heads, count * params.group
    counters = memory.flat(params.counters + 4 * request * heads, torch.int32, heads)
    slots = params.batch * heads * params.max_q_len * params.splits
    own = request * heads * params.max_q_len * params.splits
    shape = (params.kv_heads, rows, params.splits)
    used = heads * count * params.splits
    stats = memory.flat(params.scratch + 8 * own, torch.float32, 2 * used).view(*shape, 2)
    values = memory.flat(
        params.scratch + 8 * slots + 4 * own * params.head_dim, torch.float32, used * params.head_dim
    ).view(*shape, params.head_dim)
    found = counters.tolist()
    for arrived, (top, total, value) in enumerate(parts):
        stats[:, :, arrived, 0], stats[:, :, arrived, 1] = top, total
        values[:, :, arrived] = value
        merging = [head for head, before in enumerate(found) if before == params.splits - 1]
        if merging:
            result = _merged(params, count, stats[..., 0], stats[..., 1], values)
            _store(params, first, count, result, () if len(merging) == heads else merging)
        found = [0 if before == params.splits - 1 else before + 1 for before in found]
    counters.copy_(torch.tensor(found, dtype=torch.int64).to(torch.int32))
