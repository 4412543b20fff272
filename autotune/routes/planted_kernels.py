# mypy: ignore-errors
# ruff: noqa: N803
"""The Triton kernels behind ``planted_cuda``; import it only where Triton is installed.

``attend`` is attention for one (request, query head, query) a program, in fp32 on the CUDA cores: right and
small, not fast. The fault is a run-time switch, so that one compiled kernel serves every control. No string
annotations here: Triton reads them.
"""

import triton
import triton.language as tl

from autotune.routes.planted_cuda import Fault

SCALE_DROPPED = tl.constexpr(int(Fault.SCALE_DROPPED))
LOCALIZED_ERROR = tl.constexpr(int(Fault.LOCALIZED_ERROR))
FULL_MASK = tl.constexpr(int(Fault.FULL_MASK))
MASK_SHORT = tl.constexpr(int(Fault.MASK_SHORT))
VALUE_PAGE = tl.constexpr(int(Fault.VALUE_PAGE))
PAGE_EDGE = tl.constexpr(int(Fault.PAGE_EDGE))
MISPLACED_ROWS = tl.constexpr(int(Fault.MISPLACED_ROWS))
UNWRITTEN_TAIL = tl.constexpr(int(Fault.UNWRITTEN_TAIL))
WRITES_NAN = tl.constexpr(int(Fault.WRITES_NAN))
READS_OUTPUT = tl.constexpr(int(Fault.READS_OUTPUT))
PAD_NAN = tl.constexpr(int(Fault.PAD_NAN))
PAD_SKIPPED = tl.constexpr(int(Fault.PAD_SKIPPED))
GARBAGE_CLAMPED = tl.constexpr(int(Fault.GARBAGE_CLAMPED))
GARBAGE_FOLLOWED = tl.constexpr(int(Fault.GARBAGE_FOLLOWED))
INT32_OFFSET = tl.constexpr(int(Fault.INT32_OFFSET))
CONSECUTIVE_PAGES = tl.constexpr(int(Fault.CONSECUTIVE_PAGES))
QUERY_STRIDE = tl.constexpr(int(Fault.QUERY_STRIDE))
HEAD_STRIDE = tl.constexpr(int(Fault.HEAD_STRIDE))
NAN_TAIL = tl.constexpr(int(Fault.NAN_TAIL))
VALUE_SCALE_IGNORED = tl.constexpr(int(Fault.VALUE_SCALE_IGNORED))
SCALES_SWAPPED = tl.constexpr(int(Fault.SCALES_SWAPPED))
COUNTER_KEPT = tl.constexpr(int(Fault.COUNTER_KEPT))
SCRIBBLED_INPUT = tl.constexpr(int(Fault.SCRIBBLED_INPUT))
FINITE_INFINITY = tl.constexpr(int(Fault.FINITE_INFINITY))
NO_MAXIMUM = tl.constexpr(int(Fault.NO_MAXIMUM))

# Nothing depends on these being 1 or a multiple of 16: one compilation for all.
_PLAIN = [
    "q_row",
    "q_head",
    "k_page",
    "k_slot",
    "k_head",
    "v_page",
    "v_slot",
    "v_head",
    "out_row",
    "out_head",
    "table_row",
    "table_width",
    "total_pages",
    "element_size",
    "batch",
    "q_len",
    "page_size",
    "kv_heads",
    "group",
    "window_left",
    "limit",
    "fault",
]


@triton.jit(do_not_specialize=_PLAIN)
def attend(
    q,
    k,
    v,
    out,
    table,
    lens,
    counter,
    sink,
    scale,
    k_scale,
    v_scale,
    factor,
    q_row,
    q_head,
    k_page,
    k_slot,
    k_head,
    v_page,
    v_slot,
    v_head,
    out_row,
    out_head,
    table_row,
    table_width,
    total_pages,
    element_size,
    batch,
    q_len,
    page_size,
    kv_heads,
    group,
    window_left,
    limit,
    fault,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.program_id(2)
    kv_head = head // group
    dim = tl.arange(0, DIM)
    slots = tl.arange(0, BLOCK)

    kv_len = tl.minimum(tl.load(lens + request), limit)
    own = kv_len - q_len + i + 1
    end = tl.maximum(own, 1)
    end = tl.where(fault == FULL_MASK, kv_len, end)
    end = tl.where(fault == MASK_SHORT, tl.maximum(end - 1, 1), end)
    end = tl.where(fault == PAD_NAN, own, end)
    lonely = (kv_len % page_size == 1) & (end == kv_len) & (end > 1)
    end = tl.where((fault == PAGE_EDGE) & lonely, end - 1, end)
    first = tl.where(window_left >= 0, tl.maximum(end - 1 - window_left, 0), 0)
    pages = (kv_len + page_size - 1) // page_size
    row_of_table = table + request.to(tl.int64) * table_row
    first_page = tl.load(row_of_table)

    q_stride = tl.where(fault == QUERY_STRIDE, group * kv_heads * DIM, q_row)
    q_at = q + (request * q_len + i).to(tl.int64) * q_stride + head * q_head
    query = tl.load(q_at + dim).to(tl.float32)
    logit_scale = tl.where(fault == SCALE_DROPPED, scale * 0.9, scale)
    k_token = tl.where(fault == HEAD_STRIDE, k_head * kv_heads, k_slot)

    top = tl.where(fault == FINITE_INFINITY, -5.0e4, -1.0e30)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for start in range(0, kv_len, BLOCK):
        at = start + slots
        index = at // page_size
        slot = at % page_size
        live = index < pages
        seen = (at >= first) & (at < end)
        page = tl.load(row_of_table + index, mask=live, other=0)
        page = tl.where(fault == CONSECUTIVE_PAGES, tl.minimum(first_page + index, total_pages - 1), page)
        v_index = tl.where(fault == VALUE_PAGE, tl.maximum(index - 1, 0), index)
        v_id = tl.load(row_of_table + v_index, mask=live, other=0)
        v_id = tl.where(fault == CONSECUTIVE_PAGES, tl.minimum(first_page + index, total_pages - 1), v_id)

        k_base = page.to(tl.int64) * k_page
        v_base = v_id.to(tl.int64) * v_page
        k_wrapped = tl.maximum((k_base * element_size).to(tl.int32), 0).to(tl.int64) // element_size
        v_wrapped = tl.maximum((v_base * element_size).to(tl.int32), 0).to(tl.int64) // element_size
        k_base = tl.where(fault == INT32_OFFSET, k_wrapped, k_base)
        v_base = tl.where(fault == INT32_OFFSET, v_wrapped, v_base)

        k_at = k + (k_base + slot * k_token + kv_head * k_head)[:, None] + dim[None, :]
        keys = tl.load(k_at, mask=seen[:, None])
        keys = tl.where(seen[:, None], keys.to(tl.float32), 0.0)
        logits = tl.sum(query[None, :] * keys, axis=1) * logit_scale
        logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=0))
        new_top = tl.where(fault == NO_MAXIMUM, 0.0, new_top)
        weights = tl.where(seen, tl.exp(logits - new_top), 0.0)
        shrink = tl.exp(top - new_top)
        loaded = seen | ((fault == NAN_TAIL) & live)
        v_at = v + (v_base + slot * v_slot + kv_head * v_head)[:, None] + dim[None, :]
        values = tl.load(v_at, mask=loaded[:, None])
        values = tl.where(loaded[:, None], values.to(tl.float32), 0.0)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, axis=0)
        top = new_top

    if (fault == GARBAGE_CLAMPED) | (fault == GARBAGE_FOLLOWED):
        ahead = tl.load(row_of_table + pages, mask=pages < table_width, other=0)
        if fault == GARBAGE_CLAMPED:
            ahead = tl.minimum(tl.maximum(ahead, 0), total_pages - 1)
            extra = tl.load(v + ahead.to(tl.int64) * v_page + kv_head * v_head + dim)
            acc += extra.to(tl.float32) * 0.0
        else:
            fetched = tl.load(k + ahead.to(tl.int64) * k_page + dim)
            tl.store(sink + dim, fetched.to(tl.float32).to(tl.int8))

    late = tl.load(counter) > 0
    out_scale = tl.where(fault == VALUE_SCALE_IGNORED, 1.0, v_scale)
    out_scale = tl.where(fault == SCALES_SWAPPED, k_scale, out_scale)
    out_scale = tl.where((fault == COUNTER_KEPT) & late, out_scale * 0.5, out_scale)
    result = acc / total * (out_scale * factor)
    last = (request == batch - 1) & (i == q_len - 1)
    one_head = last & (head == group * kv_heads - 1)
    result = tl.where((fault == LOCALIZED_ERROR) & one_head, result * 1.05, result)
    corner = (i == 0) & (head == 0)
    result = tl.where(((fault == WRITES_NAN) & corner) & (dim == DIM - 1), float("nan"), result)

    row = request * q_len + i
    moved = request * q_len + (i + 1) % q_len
    row = tl.where((fault == MISPLACED_ROWS) & (request > 0) & (q_len % 4 != 0), moved, row)
    at_out = out + row.to(tl.int64) * out_row + head * out_head + dim
    if fault == READS_OUTPUT:
        result += tl.load(at_out).to(tl.float32) * 0.0
    skipped = ((fault == UNWRITTEN_TAIL) & last) | ((fault == PAD_SKIPPED) & (kv_len < q_len))
    tl.store(at_out, result.to(out.dtype.element_ty), mask=(dim < DIM) & (skipped == 0))

    if (fault == SCRIBBLED_INPUT) & corner:
        scratch = k + first_page.to(tl.int64) * k_page + (page_size - 1) * k_slot + dim
        tl.store(scratch, (dim * 0).to(tl.float32).to(k.dtype.element_ty))


@triton.jit(do_not_specialize=["address", "count", "write"])
def poke(address, sink, count, write, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    where = address.to(tl.pointer_type(tl.int8)) + at
    inside = at < count
    if write == 1:
        tl.store(where, tl.zeros([BLOCK], tl.int8), mask=inside)
    else:
        tl.store(sink + at, tl.load(where, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["address"])
def misaligned(address, sink):
    value = tl.inline_asm_elementwise(
        "ld.global.b32 $0, [$1];", "=r,l", [address + 1], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(sink, value.to(tl.int8))


@triton.jit
def trap(sink):
    value = tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(sink, value.to(tl.int8))


@triton.jit
def now():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["nanoseconds"])
def spin(sink, nanoseconds):
    start = now()
    passed = start - start
    while passed < nanoseconds:
        passed = now() - start
    tl.store(sink, passed.to(tl.int8))
