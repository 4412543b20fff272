"""What a call must satisfy before any kernel is launched: one small rule per way that calls went wrong.

The tuner checks every step at level ``full``, which reads tensors; an engine's plugin checks at level
``static``, which looks at shapes, strides, dtypes and host values only and never waits for a device. A
broken rule is the caller's fault, so the verdict is ``refused``, not ``unsafe``.

The first rule of all cannot be checked here: ``seq_lens`` are *total* lengths, the new tokens included,
and those are already in the pool. ``lengths`` sees it only where a total falls below ``q_len``.

Imports no torch, so that whoever maps the error to an exit code does not pay for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from autotune.domain.shape import KvLayout

if TYPE_CHECKING:
    import torch

    from autotune.routes.base import Capacity, Step

# torch dtypes by their printed names; two nvfp4 values share a byte.
TORCH_NAMES = {
    "fp64": ("torch.float64",),
    "fp32": ("torch.float32",),
    "bf16": ("torch.bfloat16",),
    "fp16": ("torch.float16",),
    "e4m3": ("torch.float8_e4m3fn",),
    "nvfp4": ("torch.uint8", "torch.float4_e2m1fn_x2"),
}
SCALED = frozenset({"e4m3", "nvfp4"})

# A CUDA grid ends here in y and z, where kernels put batch and heads; a launch past it fails, often unseen.
GRID_LIMIT = 65535


class Level(str, Enum):
    """``full`` may read tensors; ``static`` must not."""

    FULL = "full"
    STATIC = "static"


class ContractError(ValueError):
    """A call breaks the contract: the rule's name, the offending value and what it should be, in one line."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"contract rule {rule}: {message}")
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Call:
    """What the rules look at.

    Attributes:
        kv_lens: the total lengths on the host, or None where the level forbids reading them.
        out: where the result goes; None if the caller has none yet.
        pad_value: ``seq_lens`` of a padded row; None if the call has no padded rows.
        max_offset: largest element offset into the pool that is proven; None for no limit.
    """

    capacity: Capacity
    step: Step
    level: Level
    kv_lens: tuple[int, ...] | None
    out: torch.Tensor | None
    pad_value: int | None
    max_offset: int | None


def check_step(
    capacity: Capacity,
    step: Step,
    *,
    level: Level | str,
    out: torch.Tensor | None = None,
    pad_value: int | None = None,
    max_offset: int | None = None,
) -> None:
    """Check one step against every rule, in order.

    Args:
        level: ``full`` or ``static``; see :class:`Level`.
        out, pad_value, max_offset: see :class:`Call`.

    Raises:
        ContractError: the first rule that is broken.
        ValueError: an unknown level.
    """
    level = Level(level)
    kv_lens = step.host_kv_lens
    if level is Level.FULL:
        kv_lens = tuple(step.seq_lens.tolist()) if step.seq_lens.dim() == 1 else None
    call = Call(capacity, step, level, kv_lens, out, pad_value, max_offset)
    for name, rule in RULES:
        if message := rule(call):
            raise ContractError(name, message)


def _batch(call: Call) -> str | None:
    batch, most = call.step.seq_lens.shape, call.capacity.max_batch_size
    if len(batch) != 1:
        return f"seq_lens has shape {tuple(batch)}; one length per request is needed"
    if not 1 <= batch[0] <= most:
        return f"{batch[0]} requests; the session was opened for 1..{most}"
    return None


def _rows(call: Call) -> str | None:
    step, wanted = call.step, call.capacity.column.q_len
    if step.q_len != wanted:
        return f"q_len is {step.q_len}; the session was opened for {wanted}"
    if step.q.dim() != 3 or step.q.shape[0] != step.batch_size * step.q_len:
        return (
            f"q has shape {tuple(step.q.shape)}; {step.batch_size} requests x q_len {step.q_len} need "
            f"exactly {step.batch_size * step.q_len} rows of [heads, head_dim]"
        )
    return None


def _heads(call: Call) -> str | None:
    shape, step, dtypes = call.capacity.column.shape, call.step, call.capacity.column.dtypes
    packed = 2 if dtypes.kv == "nvfp4" else 1
    pool = (call.capacity.num_pages, shape.page_size, shape.num_kv_heads)
    for name, tensor, wanted in (
        ("q", step.q, (step.q.shape[0], shape.num_qo_heads, shape.head_dim)),
        ("k", step.k, (*pool, shape.head_dim // packed)),
        ("v", step.v, (*pool, shape.head_dim_vo // packed)),
    ):
        if tuple(tensor.shape) != wanted:
            return f"{name} has shape {tuple(tensor.shape)}; the session was opened for {wanted}"
    return None


def _dtypes(call: Call) -> str | None:
    step, dtypes = call.step, call.capacity.column.dtypes
    for name, tensor, wanted in (
        ("q", step.q, dtypes.q),
        ("k", step.k, dtypes.kv),
        ("v", step.v, dtypes.kv),
    ):
        if str(tensor.dtype) not in TORCH_NAMES[wanted]:
            return f"{name} is {tensor.dtype}; the session was opened for {wanted}"
    return None


def _device(call: Call) -> str | None:
    step = call.step
    tensors = {"q": step.q, "k": step.k, "v": step.v, "page_table": step.page_table}
    tensors["seq_lens"] = step.seq_lens
    if call.out is not None:
        tensors["out"] = call.out
    kind, _, index = call.capacity.device.partition(":")
    for name, tensor in tensors.items():
        device = tensor.device
        if device.type != kind or (index and device.index != int(index)) or device != step.q.device:
            return (
                f"{name} is on {device}, q on {step.q.device}; the session was opened on "
                f"{call.capacity.device}"
            )
    return None


def _page_table(call: Call) -> str | None:
    table, batch = call.step.page_table, call.step.batch_size
    if table.dim() != 2 or table.shape[0] != batch:
        return f"page_table has shape {tuple(table.shape)}; one row for each of {batch} requests is needed"
    if str(table.dtype) != "torch.int32":
        return f"page_table is {table.dtype}; int32 page numbers are needed"
    if not table.is_contiguous():
        return f"page_table has strides {table.stride()}; it must be contiguous"
    return None


def _seq_lens(call: Call) -> str | None:
    lens = call.step.seq_lens
    if str(lens.dtype) != "torch.int32":
        return f"seq_lens is {lens.dtype}; int32 is needed"
    if not lens.is_contiguous():
        return f"seq_lens has stride {lens.stride()}; it must be contiguous"
    host = call.step.host_kv_lens
    if host is not None and len(host) != call.step.batch_size:
        return f"host_kv_lens has {len(host)} lengths for {call.step.batch_size} requests"
    if call.level is Level.FULL and host is not None and host != call.kv_lens:
        row = next(
            i for i, pair in enumerate(zip(host, call.kv_lens or (), strict=True)) if len(set(pair)) > 1
        )
        return f"host_kv_lens[{row}] is {host[row]}, seq_lens[{row}] is {(call.kv_lens or ())[row]}"
    return None


def _lengths(call: Call) -> str | None:
    q_len = call.step.q_len
    for row, kv_len in enumerate(call.kv_lens or ()):
        if kv_len < q_len and kv_len != call.pad_value:
            padded = (
                "no row may be padded" if call.pad_value is None else f"padded rows have {call.pad_value}"
            )
            return (
                f"seq_lens[{row}] is {kv_len}, below q_len {q_len} "
                f"(it must count the new tokens too; {padded})"
            )
    return None


def _table_width(call: Call) -> str | None:
    table, page = call.step.page_table, call.capacity.column.shape.page_size
    longest = max(call.kv_lens or (0,))
    if table.shape[1] * page < longest:
        return (
            f"page_table is {table.shape[1]} pages of {page} tokens wide; "
            f"the longest request has {longest} tokens"
        )
    return None


def _max_seq_len(call: Call) -> str | None:
    found, wanted = call.step.max_seq_len, call.capacity.column.max_context
    if found != wanted:
        return f"max_seq_len is {found}; the session was opened for {wanted}, and kernels split the KV by it"
    longest = max(call.kv_lens or (0,))
    if longest > found:
        return f"the longest request has {longest} tokens, max_seq_len is {found}"
    return None


def _table_entries(call: Call) -> str | None:
    if call.level is not Level.FULL:
        return None
    import torch  # here the caller has it

    page, pages = call.capacity.column.shape.page_size, call.capacity.num_pages
    table, lens = call.step.page_table, call.step.seq_lens
    columns = torch.arange(table.shape[1], device=table.device)
    live = columns[None, :] * page < lens[:, None]
    bad = (live & ((table < 0) | (table >= pages))).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        return (
            f"page_table[{row}, {column}] is {int(table[row, column])}; the pool has pages 0..{pages - 1} "
            "(page numbers are needed, not token slots)"
        )
    return None


def _strides(call: Call) -> str | None:
    step, shape = call.step, call.capacity.column.shape
    for name, tensor in (("q", step.q), ("k", step.k), ("v", step.v)):
        if tensor.stride(-1) != 1:
            return f"{name} has strides {tensor.stride()}; the last must be 1"
    if step.q.shape[1] > 1 and step.q.stride(1) != shape.head_dim:
        return f"q has strides {step.q.stride()}; its heads must be {shape.head_dim} elements apart"
    if shape.head_dim == shape.head_dim_vo and step.k.stride() != step.v.stride():
        return f"k has strides {step.k.stride()}, v {step.v.stride()}; they must be equal"
    return None


def _layout(call: Call) -> str | None:
    layout, shape = KvLayout(call.capacity.column.shape.kv_layout), call.capacity.column.shape
    if shape.page_size == 1 or shape.num_kv_heads == 1:
        return None  # both orders are the same bytes
    _, token, head, _ = call.step.k.stride()
    if (token < head) != layout.value.endswith("hnd"):
        return f"k has strides {call.step.k.stride()}; that is not a {layout.value} pool"
    return None


def _scales(call: Call) -> str | None:
    step, kv = call.step, call.capacity.column.dtypes.kv
    for name in ("sm_scale", "k_scale", "v_scale"):
        value = getattr(step, name)
        if not (math.isfinite(value) and value > 0):
            return f"{name} is {value}; it must be positive and finite"
        if name != "sm_scale" and kv not in SCALED and value != 1.0:
            return f"{name} is {value}; a {kv} KV cache has no scale (1.0)"
    return None


def _grid(call: Call) -> str | None:
    step, shape = call.step, call.capacity.column.shape
    for name, value in (("batch_size", step.batch_size), ("q_len x heads", step.q_len * shape.num_qo_heads)):
        if value > GRID_LIMIT:
            return f"{name} is {value}; a launch grid ends at {GRID_LIMIT}"
    return None


def _far_pages(call: Call) -> str | None:
    offset = (call.capacity.num_pages - 1) * call.step.k.stride(0)
    if call.max_offset is not None and offset > call.max_offset:
        return f"the last page lies {offset} elements into the pool; proven are {call.max_offset}"
    return None


def _out(call: Call) -> str | None:
    out, column = call.out, call.capacity.column
    if out is None:
        return None
    wanted = (call.step.q.shape[0], column.shape.num_qo_heads, column.shape.head_dim_vo)
    if tuple(out.shape) != wanted or str(out.dtype) not in TORCH_NAMES[column.dtypes.out]:
        return f"out is {tuple(out.shape)} {out.dtype}; {wanted} {column.dtypes.out} is needed"
    if not out.is_contiguous():
        return f"out has strides {out.stride()}; it must be contiguous"
    return None


# Ordered so that a rule may rely on those before it.
RULES: tuple[tuple[str, Callable[[Call], str | None]], ...] = (
    ("batch", _batch),
    ("rows", _rows),
    ("heads", _heads),
    ("dtypes", _dtypes),
    ("device", _device),
    ("page_table", _page_table),
    ("seq_lens", _seq_lens),
    ("lengths", _lengths),
    ("table_width", _table_width),
    ("max_seq_len", _max_seq_len),
    ("table_entries", _table_entries),
    ("strides", _strides),
    ("layout", _layout),
    ("scales", _scales),
    ("grid", _grid),
    ("far_pages", _far_pages),
    ("out", _out),
)
