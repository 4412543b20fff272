"""The numeric oracle: attention in fp64 over what the operands hold, and the error a kernel is allowed.

**Reference.** Query i of a request with ``kv_len`` tokens sees the tokens
``[max(0, vis - 1 - window_left) .. vis)``, where ``vis = max(1, kv_len - q_len + i + 1)``. Operands are
read as stored and dequantised with the step's scales; everything after that is fp64.

**Error.** Per (query row, head): ``||out - ref||_2 / ||ref||_2`` over head_dim_vo. A reference of norm zero
(no random operand gives one) is compared absolutely: the norm is taken as 1.

**Bound.** With random operands (q, K, V standard normal, softmax scale 1/sqrt(head_dim)) the reference is
``sum p_i v_i`` over nearly orthogonal ``v_i``, so that ``||ref||^2 ~ head_dim_vo * sum p_i^2`` and a relative
error ``|delta_i| <= eps`` of each weight gives an error ``sum p_i delta_i v_i`` of about ``eps * ||ref||``.
With u(t) the unit roundoff of dtype t (2^-p for p significant bits, round to nearest):

====================  =======================================================================================
u(out)                one rounding of each output element
S * u(p)              the weights are rounded to p, the type that feeds the second product: the finer of
                      the query's and the KV's unless the kernel says otherwise
S * sqrt(5) * u(s)    logits rounded to s: delta_i = |logit_i| u(s), and a standard normal logit weighted
                      with p_i^2 ~ exp(2 logit_i) has mean 2 and variance 1, a mean square of 5. fp32 in every
                      kernel that does not say otherwise
S * u(o)              partial outputs of a KV split stored in o; fp32 unless said otherwise
S * 0.3 L * u(q')     the query is quantised to q' where the kernel does that: see below
S * 0.3 L * u(c)      K is rounded to c where the kernel does that, element by element like a query
S * u(c)              V is rounded to c there
S * L * a * u(fp32)   accumulation in fp32, a = sqrt(head_dim) for a logit + 2 sqrt(n) for the n-term sums
                      of weights and outputs + 16 for exp (two ulp, and the rounding of an argument up to 12)
====================  =======================================================================================

S = exp(6 / sqrt(head_dim_vo)) is six standard deviations of the ratio of two independent norms over
head_dim_vo normal elements (the F distribution's square root). L = 6: by Higham and Mary (SIAM J. Sci.
Comput. 41, 2019) a sum of n terms errs by less than L sqrt(n) u but for a chance of 2n exp(-L^2/2).

A query rounded element by element to q' moves a logit by ``sum q_d eps_d k_d / sqrt(head_dim)``: a normal
number with the standard deviation of eps, 0.42 u(q') (a uniform error over a log-uniform mantissa). The sum
of weights takes out what all tokens share, which leaves a row that sees one token no error, and one that
sees two equal ones ``0.71 |z| 0.42 u(q')`` for a standard normal z; more tokens average. With |z| up to L
that is 0.3 L u(q'). Rounding the query and rounding the weights are independent: their squares add.

The reference reads K and V as they are stored. Their quantisation is the engine's choice and the same for
every route, so it belongs to the checkpoint's accuracy, not to a kernel's: with it (about 0.04 for e4m3) the
bound would be eight times as wide and hide what it is there to see. What a route quantises *itself*, the
query or the weights, counts in full.

What the bound can see: a mask wrong by one token moves the output by about ``1 / sqrt(e * kv_len)`` of its
norm, the worst of many rows several times that. Of 20 launches of one row of 8 heads in bf16 (bound 0.012 at
head_dim 64, 0.011 at 128; correct kernels 0.002 to 0.0035) the smallest such error was 0.034 at kv_len 256,
0.015 at 1,024 and 0.011 at 4,096: from there on, single tokens are the business of ``position_coded``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autotune.routes.arithmetic import Arithmetic

if TYPE_CHECKING:
    from autotune.arena.operands import Operands
    from autotune.domain.cell import Column

# Unit roundoffs, round to nearest: 2^-p with p significant bits (the hidden one counts).
UNIT_ROUNDOFF = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "e4m3": 2.0**-4,
}

LIKELY = 6.0  # L and the standard deviations in S above
EXP_ULPS = 16.0
QUERY_SPREAD = 0.3  # of L u(q'): 0.71 * 0.42, see above

# Bytes of K and V in fp64 that one block of the reference may take: caches on the CPU, launches on a GPU.
BLOCK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest error of any (row, head); ``row`` is a row of q and of out."""

    error: float
    row: int
    head: int


def visible(kv_len: int, q_len: int, i: int, window_left: int) -> tuple[int, int]:
    """Tokens [first, end) that query ``i`` of a request with ``kv_len`` tokens sees."""
    end = max(1, kv_len - q_len + i + 1)
    first = max(0, end - 1 - window_left) if window_left >= 0 else 0
    return first, end


def reference(operands: Operands) -> torch.Tensor:
    """Attention in fp64: [rows, num_qo_heads, head_dim_vo], on the operands' device.

    Lengths are taken from the recipe, page ids from ``operands.pages``: what the launch *means*, not what its
    metadata happen to hold. Requests of like length go together, long ones block by block of tokens, so that
    neither a batch of 256 nor 131072 tokens makes a tensor of many GiB.

    A sink is one more logit of a head, unscaled, whose value is zero: it joins the softmax's sum alone.
    """
    column, step = operands.column, operands.step
    shape, q_len = column.shape, column.q_len
    device = step.q.device
    out = torch.empty(
        (step.q.shape[0], shape.num_qo_heads, shape.head_dim_vo), dtype=torch.float64, device=device
    )
    token_bytes = shape.num_kv_heads * (shape.head_dim + shape.head_dim_vo) * 8
    most = max(shape.page_size, BLOCK_BYTES[device.type] // token_bytes)
    for requests in _groups(operands, most):
        rows = (torch.tensor(requests)[:, None] * q_len + torch.arange(q_len)).flatten().to(device)
        out[rows] = _attend(operands, requests, rows, most)
    return out


def _span(operands: Operands, request: int) -> tuple[int, int]:
    """First page and number of pages that the queries of ``request`` see."""
    column, kv_len = operands.column, operands.recipe.kv_lens[request]
    first, _ = visible(kv_len, column.q_len, 0, column.shape.window_left)
    _, end = visible(kv_len, column.q_len, column.q_len - 1, column.shape.window_left)
    page = column.shape.page_size
    return first // page, -(-end // page) - first // page


def _groups(operands: Operands, most: int) -> list[list[int]]:
    """Requests cut into groups of like length: padded to its longest, a group has at most ``most`` tokens."""
    page = operands.column.shape.page_size
    lengths = [_span(operands, request)[1] * page for request in range(len(operands.recipe.kv_lens))]
    groups: list[list[int]] = []
    for request in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if groups and (len(groups[-1]) + 1) * lengths[request] <= min(most, 4 * _sum(lengths, groups[-1])):
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def _sum(lengths: list[int], requests: list[int]) -> int:
    return sum(lengths[request] for request in requests)


def _attend(operands: Operands, requests: list[int], rows: torch.Tensor, most: int) -> torch.Tensor:
    """The reference of some requests: [len(rows), num_qo_heads, head_dim_vo]. Softmax block by block."""
    column, step = operands.column, operands.step
    shape, q_len, count, device = column.shape, column.q_len, len(requests), step.q.device
    page, heads, group = shape.page_size, shape.num_kv_heads, shape.group
    spans = [_span(operands, request) for request in requests]
    width = max(pages for _, pages in spans)
    table = torch.zeros((count, width), dtype=torch.int64)
    for index, (request, (first, pages)) in enumerate(zip(requests, spans, strict=True)):
        # past its end a request repeats its first page: any page will do, its tokens are masked
        table[index] = operands.pages[request][first]
        table[index, :pages] = torch.as_tensor(operands.pages[request][first : first + pages])
    limits = torch.tensor(
        [
            [visible(operands.recipe.kv_lens[r], q_len, i, shape.window_left) for i in range(q_len)]
            for r in requests
        ]
    )
    limits -= torch.tensor([first * page for first, _ in spans])[:, None, None]
    table, limits = table.to(device), limits.to(device)
    low, high = limits[..., 0], limits[..., 1]  # [count, q_len], counted from the request's first page here

    q = step.q[rows].to(torch.float64).view(count, q_len, heads, group, shape.head_dim)
    q = q.permute(0, 2, 1, 3, 4).reshape(count, heads, q_len * group, shape.head_dim)
    q = q * (step.sm_scale * step.k_scale)
    top = torch.full((count, heads, q_len * group, 1), -math.inf, dtype=torch.float64, device=device)
    total = torch.zeros_like(top)
    acc = torch.zeros((*top.shape[:3], shape.head_dim_vo), dtype=torch.float64, device=device)
    if step.sinks is not None:
        # query rows are ordered (query, head of the group)
        sinks = step.sinks.to(torch.float64).view(heads, 1, group).expand(-1, q_len, -1)
        top.copy_(sinks.reshape(1, heads, q_len * group, 1).expand_as(top))
        total.fill_(1.0)
    k_cache, v_cache = operands.caches
    stride = max(1, most // (count * page))
    for start in range(0, width, stride):
        ids = table[:, start : start + stride]
        tokens = ids.shape[1] * page
        # [count, heads, tokens, dim]
        k = k_cache.pages(ids, torch.float64).flatten(1, 2).transpose(1, 2)
        logits = torch.matmul(q, k.transpose(2, 3))
        if shape.soft_cap > 0.0:
            logits = torch.tanh(logits / shape.soft_cap) * shape.soft_cap
        at = torch.arange(start * page, start * page + tokens, device=device)
        hidden = (at < low[..., None]) | (at >= high[..., None])  # [count, q_len, tokens]
        hidden = hidden[:, None, :, None].expand(-1, heads, -1, group, -1).reshape(logits.shape)
        logits.masked_fill_(hidden, -math.inf)
        new_top = torch.maximum(top, logits.amax(dim=-1, keepdim=True))
        # a row that has seen nothing yet keeps -inf: its weights are zero, not exp(-inf + inf)
        base = torch.where(new_top == -math.inf, torch.zeros_like(new_top), new_top)
        weights = torch.exp(logits.sub_(base))
        shrink = torch.exp(top - base)
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        v = v_cache.pages(ids, torch.float64).flatten(1, 2).transpose(1, 2)
        # 0 x NaN is NaN: what no query of the request sees is taken out
        unseen = (at < low.amin(dim=1)[:, None]) | (at >= high.amax(dim=1)[:, None])  # [count, tokens]
        v = v.masked_fill(unseen[:, None, :, None], 0.0)
        acc = acc * shrink + torch.matmul(weights, v)
        top = new_top
    result = (acc / total).mul_(step.v_scale).view(count, heads, q_len, group, shape.head_dim_vo)
    return result.permute(0, 2, 1, 3, 4).reshape(count * q_len, heads * group, shape.head_dim_vo)


def worst(out: torch.Tensor, ref: torch.Tensor) -> Worst:
    """The largest error of any (row, head) of ``out`` against ``ref``.

    Raises:
        ValueError: nothing to compare, or ``out`` has a non-finite element: that is a finding of its own.
    """
    if out.numel() == 0 or out.shape != ref.shape:
        raise ValueError(f"cannot compare {tuple(out.shape)} with {tuple(ref.shape)}")
    norm = torch.linalg.vector_norm(ref, dim=-1)
    norm = torch.where(norm == 0, torch.ones_like(norm), norm)
    error = torch.linalg.vector_norm(out.to(torch.float64) - ref, dim=-1) / norm
    index = int(error.argmax())
    value = float(error.flatten()[index])
    if not math.isfinite(value):
        raise ValueError("the output has a non-finite element")
    return Worst(value, *divmod(index, error.shape[1]))


def roundoff(dtype: str) -> float:
    """Unit roundoff of ``dtype``.

    Raises:
        NotImplementedError: none is known, so no bound can be derived.
    """
    if dtype not in UNIT_ROUNDOFF:
        raise NotImplementedError(f"no unit roundoff is known for dtype {dtype!r}: its error has no bound")
    return UNIT_ROUNDOFF[dtype]


def weights_roundoff(column: Column, arithmetic: Arithmetic) -> float:
    """Unit roundoff of the softmax's result as it feeds the second product."""
    if arithmetic.weights is not None:
        return roundoff(arithmetic.weights)
    query = arithmetic.query or column.dtypes.q
    if column.dtypes.kv == "nvfp4":  # no kernel multiplies by e2m1 weights: V is widened to the query's type
        return roundoff(query)
    return min(roundoff(query), roundoff(column.dtypes.kv))


def bound(column: Column, arithmetic: Arithmetic | None = None) -> float:
    """Largest error of a correct kernel in ``column``; the module's docstring derives it.

    Raises:
        NotImplementedError: no unit roundoff is known for one of the dtypes.
    """
    arithmetic = arithmetic or Arithmetic()
    shape = column.shape
    spread = math.exp(LIKELY / math.sqrt(shape.head_dim_vo))
    accumulation = math.sqrt(shape.head_dim) + 2 * math.sqrt(column.max_context) + EXP_ULPS
    query = 0.0
    if arithmetic.query is not None and roundoff(arithmetic.query) > roundoff(column.dtypes.q):
        query = QUERY_SPREAD * LIKELY * roundoff(arithmetic.query)
    cache = 0.0 if arithmetic.cache is None else roundoff(arithmetic.cache)
    inner = (
        math.hypot(weights_roundoff(column, arithmetic), query, QUERY_SPREAD * LIKELY * cache)
        + cache
        + math.sqrt(5) * roundoff(arithmetic.logits)
        + roundoff(arithmetic.partials)
        + LIKELY * accumulation * roundoff("fp32")
    )
    return roundoff(column.dtypes.out) + spread * inner


def mean_bound(column: Column, arithmetic: Arithmetic | None = None) -> float:
    """Largest error where all visible weights are equal (the ``uniform`` half of ``position_coded``).

    Logits are all zero, so neither they nor exp err, and a rounding of the common weight scales the whole
    output: u(out) + u(p) + u(o) + L 2 sqrt(n) u(fp32). The codes in V are exact in every type.
    """
    arithmetic = arithmetic or Arithmetic()
    return (
        roundoff(column.dtypes.out)
        + weights_roundoff(column, arithmetic)
        + roundoff(arithmetic.partials)
        + LIKELY * 2 * math.sqrt(column.max_context) * roundoff("fp32")
    )
