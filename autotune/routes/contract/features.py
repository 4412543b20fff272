"""Rules of scales, masks and features: what is asked of the kernel must reach it, once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autotune.routes.contract.call import NVFP4_BLOCK, SCALED, TORCH_NAMES, Call, Rule

if TYPE_CHECKING:
    import torch

_SCALES = ("sm_scale", "k_scale", "v_scale")


def _host_scales(call: Call) -> str | None:
    if not call.kernel.host_scales:
        return None
    for name in _SCALES:
        value = getattr(call.step, name)
        if type(value) is not float:
            shown = f"{value!r} " if isinstance(value, (int, str)) else ""
            return f"{name} is {shown}({type(value).__name__}); {call.kernel.name} takes Python floats only"
    return None


def _scales(call: Call) -> str | None:
    step, kv = call.step, call.capacity.column.dtypes.kv
    for name in _SCALES:
        value = getattr(step, name)
        if not isinstance(value, (int, float)):
            if not call.full:
                continue  # a device tensor: to look at it is to wait for the device
            value = float(value)
        if not (math.isfinite(value) and value > 0):
            return f"{name} is {value}; it must be positive and finite"
        if name != "sm_scale" and kv not in SCALED and value != 1.0:
            return f"{name} is {value}; a {kv} KV cache has no scale (1.0)"
    return None


def _block_scales(call: Call) -> str | None:
    column, blocks = call.capacity.column, call.step.kv_block_scales
    shape, kv = column.shape, column.dtypes.kv
    if kv != "nvfp4":
        return None if blocks is None else f"kv_block_scales are given; a {kv} KV cache has none"
    if blocks is None:
        return "kv_block_scales are None; an nvfp4 KV cache cannot be read without"
    pool = (call.capacity.num_pages, shape.page_size, shape.num_kv_heads)
    for name, tensor, dim in zip("kv", blocks, (shape.head_dim, shape.head_dim_vo), strict=True):
        wanted = (*pool, dim // NVFP4_BLOCK)
        if tuple(tensor.shape) != wanted or str(tensor.dtype) not in TORCH_NAMES["e4m3"]:
            return f"block scales of {name} are {tuple(tensor.shape)} {tensor.dtype}; {wanted} e4m3 is needed"
        if tensor.device != call.step.q.device:
            return f"block scales of {name} are on {tensor.device}, q on {call.step.q.device}"
    return None


def _q_scale(call: Call) -> str | None:
    dtypes = call.capacity.column.dtypes
    value: object = call.context.q_scale
    if not isinstance(value, (int, float)):  # to compare a tensor is to launch a kernel, and to wait for it
        return f"q_scale is a {type(value).__name__}; a Python number is needed"
    if value == 1.0:
        return None
    if not (math.isfinite(value) and value > 0):
        return f"q_scale is {value}; it must be positive and finite"
    quantised = dtypes.q in SCALED or (call.kernel.fp8_query and dtypes.kv in SCALED)
    if not quantised:
        return (
            f"q_scale is {value}; {call.kernel.name} gets a {dtypes.q} query here, which has no scale (1.0)"
        )
    return None


def _sinks(call: Call) -> str | None:
    shape, sinks = call.capacity.column.shape, call.step.sinks
    if not shape.sinks:
        return None if sinks is None else "sinks are given; the session was opened without"
    if sinks is None:
        return "sinks are None; the session was opened with sinks"
    if not call.kernel.sinks:
        return f"sinks are given; {call.kernel.name} drops them without an error"
    if tuple(sinks.shape) != (shape.num_qo_heads,) or str(sinks.dtype) != "torch.float32":
        return f"sinks are {tuple(sinks.shape)} {sinks.dtype}; ({shape.num_qo_heads},) fp32 is needed"
    return None


def _soft_cap(call: Call) -> str | None:
    cap = call.capacity.column.shape.soft_cap
    if cap and not call.kernel.soft_cap:
        return f"soft_cap is {cap}; {call.kernel.name} has none and would drop it"
    return None


def _plan(call: Call) -> str | None:
    plan, column = call.context.plan, call.capacity.column
    if plan is None:
        return None
    shape, dtypes = column.shape, column.dtypes
    for name, asked in (
        ("q_len", column.q_len),
        ("window_left", shape.window_left),
        ("soft_cap", shape.soft_cap),
        ("sinks", shape.sinks),
        ("mask", shape.mask),
        ("q", dtypes.q),
        ("kv", dtypes.kv),
        ("out", dtypes.out),
    ):
        planned = getattr(plan, name)
        if planned != asked:
            return f"{name} is {asked} at run and was {planned} at plan; the compiled kernel keeps the plan's"
    return None


def _draft_mask(call: Call) -> str | None:
    buffers, step, shape = call.context.buffers, call.step, call.capacity.column.shape
    if buffers is None or not call.kernel.draft_mask or step.q_len == 1:
        return None
    mask, words = buffers.mask, 2 * -(-step.q_len // 32)
    if mask is None:
        return f"no mask is given; {call.kernel.name} needs one for q_len {step.q_len}"
    if buffers.mask_kind != shape.mask:
        return f"the mask is of kind {buffers.mask_kind}; proven is {shape.mask}"
    wanted = (step.batch_size, step.q_len, words)
    if tuple(mask.shape) != wanted or str(mask.dtype) != "torch.uint16" or not mask.is_contiguous():
        return (
            f"the mask is {tuple(mask.shape)} {mask.dtype}, strides {mask.stride()}; contiguous {wanted} "
            f"uint16 is needed, packed for q_len {step.q_len}"
        )
    return _mask_words(mask, step.q_len, words) if call.full else None


def _mask_words(mask: torch.Tensor, q_len: int, words: int) -> str | None:
    import torch

    rows = [[((2 << row) - 1) >> (16 * word) & 0xFFFF for word in range(words)] for row in range(q_len)]
    found = mask.cpu().view(torch.int16).to(torch.int32) & 0xFFFF
    wrong = (found != torch.tensor(rows, dtype=torch.int32)).nonzero()
    if len(wrong):
        request, row, word = wrong[0].tolist()
        return (
            f"mask[{request}, {row}, {word}] is {int(found[request, row, word]):#06x}; a causal mask has "
            f"{rows[row][word]:#06x} there"
        )
    return None


HOST_SCALES = Rule("host_scales", _host_scales, "a scale of another type is refused, or taken for another")
SCALES = Rule(
    "scales",
    _scales,
    "a scale is applied to a cache that has none, or the softmax is turned over",
    ("sglang #18396", "vllm #48016"),
)
BLOCK_SCALES = Rule(
    "block_scales", _block_scales, "another pool's scales, or none, are read as far as this pool reaches"
)
Q_SCALE = Rule(
    "q_scale", _q_scale, "a query that was not quantised is scaled all the same", ("sglang #28144",)
)
SINKS = Rule("sinks", _sinks, "attention sinks are dropped without an error")
SOFT_CAP = Rule("soft_cap", _soft_cap, "the cap is never applied", ("sglang #33915",))
PLAN = Rule(
    "plan",
    _plan,
    "the kernel was compiled without the feature that run asks for",
    ("sglang #31501", "sglang #33915"),
)
DRAFT_MASK = Rule(
    "draft_mask", _draft_mask, "new tokens see each other as another mask says", ("flashinfer #4198",)
)
