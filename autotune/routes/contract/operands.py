"""Rules of q, K, V and out: how many, how wide, of what, where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.domain.shape import KvLayout
from autotune.routes.contract.call import TORCH_NAMES, Call, Rule

if TYPE_CHECKING:
    import torch


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


def _uniform(call: Call) -> str | None:
    lens, step = call.q_lens, call.step
    if lens is None:
        return None
    if len(lens) != step.batch_size:
        return f"q_lens has {len(lens)} entries for {step.batch_size} requests"
    if call.kernel.uniform_q_len:
        for row, found in enumerate(lens):
            if found != step.q_len:
                return f"q_lens[{row}] is {found}; {call.kernel.name} takes one q_len for all, {step.q_len}"
    if min(lens) < 1 or max(lens) > step.q_len or sum(lens) != step.q.shape[0]:
        return (
            f"q_lens from {min(lens)} to {max(lens)}, {sum(lens)} in all; each must be 1..{step.q_len}, and "
            f"q has {step.q.shape[0]} rows"
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
    for name, tensor in (("out", call.out), ("sinks", step.sinks)):
        if tensor is not None:
            tensors[name] = tensor
    kind, _, index = call.capacity.device.partition(":")
    for name, tensor in tensors.items():
        device = tensor.device
        if device.type != kind or (index and device.index != int(index)) or device != step.q.device:
            return (
                f"{name} is on {device}, q on {step.q.device}; the session was opened on "
                f"{call.capacity.device}"
            )
    return None


def _current_device(call: Call) -> str | None:
    current, found = call.context.current_device, call.step.q.device.index
    if current is not None and found is not None and found != current:
        return f"q is on device {found}; the current device, on which the kernel is launched, is {current}"
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


def _dense_query(call: Call) -> str | None:
    shape, found = call.capacity.column.shape, call.step.q.stride()
    wanted = (shape.num_qo_heads * shape.head_dim, shape.head_dim, 1)
    if call.kernel.dense_query and found != wanted:
        return (
            f"q has strides {found}; {call.kernel.name} gets no query stride and takes {wanted} only "
            "(size-1 dimensions too, which contiguous() leaves as they are)"
        )
    return None


def _layout(call: Call) -> str | None:
    layout, shape = KvLayout(call.capacity.column.shape.kv_layout), call.capacity.column.shape
    k, v = call.step.k, call.step.v
    _, token, head, _ = k.stride()
    # a stride that no element uses may have any value
    used = [step for step, size in ((token, shape.page_size), (head, shape.num_kv_heads)) if size > 1]
    row = k.shape[-1] * (2 if layout.packed else 1)
    if used and min(used) != row:
        return f"k has strides {k.stride()}; the rows of a {layout.value} pool are {row} elements apart"
    if layout.packed and v.data_ptr() - k.data_ptr() != k.shape[-1] * k.element_size():
        return f"v does not begin {k.shape[-1]} elements after k; that is not a {layout.value} pool"
    # with one head or one token a page both orders are the same bytes
    if len(used) == 2 and (token < head) != layout.value.endswith("hnd"):
        return f"k has strides {k.stride()}; that is not a {layout.value} pool"
    return None


def _alignment(call: Call) -> str | None:
    step, unit = call.step, call.kernel.alignment
    if unit == 1:
        return None
    for name, tensor in (("q", step.q), ("k", step.k), ("v", step.v), ("out", call.out)):
        if tensor is None:
            continue
        if tensor.data_ptr() % unit:
            return f"{name} begins at {tensor.data_ptr():#x}; {call.kernel.name} needs a multiple of {unit}"
        if off := _off(tensor, unit):
            return (
                f"{name} has a stride of {off} bytes; {call.kernel.name} needs multiples of {unit} "
                f"(strides {tensor.stride()} x {tensor.element_size()} bytes)"
            )
    return None


def _off(tensor: torch.Tensor, unit: int) -> int | None:
    """Bytes of the first stride that is no multiple of ``unit`` and is used; None if all are."""
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1 and stride * tensor.element_size() % unit:
            return stride * tensor.element_size()
    return None


def _grid(call: Call) -> str | None:
    step, shape, limit = call.step, call.capacity.column.shape, call.kernel.grid_limit
    if limit is None:
        return None
    for name, value in (("batch_size", step.batch_size), ("q_len x heads", step.q_len * shape.num_qo_heads)):
        if value > limit:
            return f"{name} is {value}; a launch grid ends at {limit}"
    return None


def _far_pages(call: Call) -> str | None:
    offset = (call.capacity.num_pages - 1) * call.step.k.stride(0)
    if call.max_offset is not None and offset > call.max_offset:
        return f"the last page lies {offset} elements into the pool; proven are {call.max_offset}"
    return None


BATCH = Rule("batch", _batch, "metadata of another batch is read", ("xllm #1939", "sglang #26655"))
ROWS = Rule(
    "rows",
    _rows,
    "the batch is derived from rows // q_len: later requests are misplaced",
    ("flashinfer #3871", "flashinfer #1832"),
)
UNIFORM = Rule("uniform_q_len", _uniform, "requests of other lengths are mis-strided", ("vllm #31594",))
HEADS = Rule("heads", _heads, "another shape, or another pool, than was proven", ("sglang #26957",))
DTYPES = Rule("dtypes", _dtypes, "bytes are read as another type", ("sglang #28144",))
DEVICE = Rule("device", _device, "an address of another device is followed", ("flashinfer #452",))
CURRENT_DEVICE = Rule(
    "current_device",
    _current_device,
    "the kernel is chosen for, and launched on, another device",
    ("flashinfer #349", "flashinfer #924"),
)
OUT = Rule("out", _out, "rows are written past the output", ("flashinfer #3929",))
STRIDES = Rule("strides", _strides, "K's strides are used for V", ("vllm #21133", "vllm #32353"))
DENSE_QUERY = Rule(
    "dense_query",
    _dense_query,
    "other rows of a packed projection are taken for queries",
    ("vllm #21133", "vllm #32353", "vllm #32417"),
)
LAYOUT = Rule("layout", _layout, "tokens are taken for heads; libraries' defaults differ by function")
ALIGNMENT = Rule("alignment", _alignment, "a misaligned load, or a refused descriptor", ("cubecl #1510",))
GRID = Rule("grid", _grid, "the launch fails unseen, and the output is stale", ("pytorch #142228",))
FAR_PAGES = Rule(
    "far_pages", _far_pages, "32-bit offsets wrap to other pages", ("vllm #47671", "vllm #50427")
)
