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
S * L * a * u(fp32)   accumulation in fp32, a = sqrt(head_dim) for a logit + 2 sqrt(n) for the n-term sums
                      of weights and outputs + 16 for exp (two ulp, and the rounding of an argument up to 12)
====================  =======================================================================================

S = exp(6 / sqrt(head_dim_vo)) is six standard deviations of the ratio of two independent norms over
head_dim_vo normal elements (the F distribution's square root). L = 6: by Higham and Mary (SIAM J. Sci.
Comput. 41, 2019) a sum of n terms errs by less than L sqrt(n) u but for a chance of 2n exp(-L^2/2).

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


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Types in which a kernel holds what it does not return.

    A route whose kernel departs from fp32 logits and partial outputs says so with an attribute
    ``arithmetic``; the bound widens by exactly that rounding.

    Attributes:
        logits: q.k before the softmax.
        weights: the softmax's result as it feeds the second product; None: the finer of the query's and the
            KV's types.
        partials: per-split outputs before they are merged.
    """

    logits: str = "fp32"
    weights: str | None = None
    partials: str = "fp32"


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
    metadata happen to hold.

    Raises:
        NotImplementedError: the shape has a feature that this oracle does not model (attention sinks).
    """
    column, step = operands.column, operands.step
    shape, q_len = column.shape, column.q_len
    if shape.sinks:
        raise NotImplementedError("the oracle does not model attention sinks")
    device = step.q.device
    heads, kv_heads, group = shape.num_qo_heads, shape.num_kv_heads, shape.group
    out = torch.empty((step.q.shape[0], heads, shape.head_dim_vo), dtype=torch.float64, device=device)
    for row, kv_len in enumerate(operands.recipe.kv_lens):
        spans = [visible(kv_len, q_len, i, shape.window_left) for i in range(q_len)]
        low = min(first for first, _ in spans)
        first_page = low // shape.page_size
        base = first_page * shape.page_size
        high = max(end for _, end in spans)
        pages = torch.tensor(operands.pages[row][first_page:], device=device)
        # [kv_heads, tokens, dim]; converted before the permutation, so that fp64 is laid out once
        k = step.k[pages].flatten(0, 1)[low - base : high - base].to(torch.float64).transpose(0, 1)
        v = step.v[pages].flatten(0, 1)[low - base : high - base].to(torch.float64).transpose(0, 1)
        q = step.q[row * q_len : (row + 1) * q_len].to(torch.float64)
        q = q.reshape(q_len, kv_heads, group, shape.head_dim).permute(1, 0, 2, 3).flatten(1, 2)
        logits = torch.matmul(q, k.transpose(1, 2)).mul_(step.sm_scale * step.k_scale)
        if shape.soft_cap > 0.0:
            logits = torch.tanh(logits / shape.soft_cap) * shape.soft_cap
        logits = logits.view(kv_heads, q_len, group, high - low)
        for i, (first, end) in enumerate(spans):
            logits[:, i, :, : first - low] = -math.inf
            logits[:, i, :, end - low :] = -math.inf
        weights = torch.softmax(logits, dim=-1).flatten(1, 2)
        result = torch.matmul(weights, v).mul_(step.v_scale)
        result = result.view(kv_heads, q_len, group, shape.head_dim_vo).permute(1, 0, 2, 3)
        out[row * q_len : (row + 1) * q_len] = result.reshape(q_len, heads, shape.head_dim_vo)
    return out


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
    return min(roundoff(column.dtypes.q), roundoff(column.dtypes.kv))


def bound(column: Column, arithmetic: Arithmetic | None = None) -> float:
    """Largest error of a correct kernel in ``column``; the module's docstring derives it.

    Raises:
        NotImplementedError: no unit roundoff is known for one of the dtypes.
    """
    arithmetic = arithmetic or Arithmetic()
    shape = column.shape
    spread = math.exp(LIKELY / math.sqrt(shape.head_dim_vo))
    accumulation = math.sqrt(shape.head_dim) + 2 * math.sqrt(column.max_context) + EXP_ULPS
    inner = (
        weights_roundoff(column, arithmetic)
        + math.sqrt(5) * roundoff(arithmetic.logits)
        + roundoff(arithmetic.partials)
        + LIKELY * accumulation * roundoff("fp32")
    )
    return roundoff(column.dtypes.out) + spread * inner


def mean_bound(column: Column, arithmetic: Arithmetic | None = None) -> float:
    """Largest error where all visible weights are equal (the ``uniform`` half of ``position_coded``).

    Logits are all zero, so neither they nor exp err, and a rounding of the common weight scales the whole
    output: u(out) + u(p) + u(o) + L 2 sqrt(n) u(fp32).
    """
    arithmetic = arithmetic or Arithmetic()
    return (
        roundoff(column.dtypes.out)
        + weights_roundoff(column, arithmetic)
        + roundoff(arithmetic.partials)
        + LIKELY * 2 * math.sqrt(column.max_context) * roundoff("fp32")
    )
