"""Rules of lengths and page tables. The first of all is ``new_tokens``: lengths are *total* lengths."""

from __future__ import annotations

from autotune.routes.contract.call import Call, Rule


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
    if call.full and host is not None:
        for row, (said, found) in enumerate(zip(host, call.kv_lens or (), strict=True)):
            if said != found:
                return f"host_kv_lens[{row}] is {said}, seq_lens[{row}] is {found}"
    return None


def _new_tokens(call: Call) -> str | None:
    cached = call.cached_lens
    if cached is None:
        return None
    if len(cached) != call.step.batch_size:
        return f"cached_lens has {len(cached)} lengths for {call.step.batch_size} requests"
    added = call.q_lens or (call.step.q_len,) * len(cached)
    for row, (found, before, new) in enumerate(zip(call.kv_lens or (), cached, added, strict=False)):
        if found != before + new and found != call.pad_value:
            return (
                f"seq_lens[{row}] is {found}; the request held {before} tokens and has {new} new ones, "
                f"{before + new} in all, which must be counted and already written"
            )
    return None


def _empty_rows(call: Call) -> str | None:
    for row, kv_len in enumerate(call.kv_lens or ()):
        if kv_len <= 0 and kv_len != call.pad_value:
            return f"seq_lens[{row}] is {kv_len}; an empty row is legal only as a proven pad value of 0"
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


def _masked_rows(call: Call) -> str | None:
    if call.kernel.masked_rows:
        return None
    for row, kv_len in enumerate(call.kv_lens or ()):
        if kv_len < call.step.q_len:
            return (
                f"seq_lens[{row}] is {kv_len}, a padded row below q_len {call.step.q_len}: its first queries "
                f"see nothing, and {call.kernel.name} takes no such row"
            )
    return None


def _table_width(call: Call) -> str | None:
    table, page = call.step.page_table, call.capacity.column.shape.page_size
    covered = table.shape[1] * page
    if call.kv_lens is None:  # what the lengths may grow to; a graph is captured once for all of them
        if covered < call.step.max_seq_len:
            return (
                f"page_table is {table.shape[1]} pages of {page} tokens wide; seq_lens are on the device and "
                f"may reach max_seq_len {call.step.max_seq_len}"
            )
        return None
    longest = max(call.kv_lens, default=0)
    if covered < longest:
        return (
            f"page_table is {table.shape[1]} pages of {page} tokens wide; "
            f"the longest request has {longest} tokens"
        )
    return None


def _split_width(call: Call) -> str | None:
    found, wanted = call.step.page_table.shape[1], call.capacity.column.table_width
    if call.kernel.split_by_width and found != wanted:
        return (
            f"page_table is {found} pages wide; {call.kernel.name} splits the KV by this width, and proven "
            f"is {wanted}"
        )
    return None


def _table_multiple(call: Call) -> str | None:
    width, page = call.step.page_table.shape[1], call.capacity.column.shape.page_size
    unit = call.kernel.table_multiple
    if width * page % unit:
        return (
            f"page_table is {width} pages of {page} tokens wide; {call.kernel.name} needs a multiple of "
            f"{unit} tokens"
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
    if not call.full:
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


PAGE_TABLE = Rule("page_table", _page_table, "rows of the table are read at another stride", ("xllm #1939",))
SEQ_LENS = Rule("seq_lens", _seq_lens, "a plan is made for other lengths than the launch reads")
NEW_TOKENS = Rule(
    "new_tokens",
    _new_tokens,
    "the decode kernel counts from the end: it reads and masks the wrong tokens",
    ("sglang #24920", "sglang #36430"),
)
EMPTY_ROWS = Rule(
    "empty_rows",
    _empty_rows,
    "lengths are unsigned in kernels; NaN, or a row left as it was",
    ("sglang #1469", "sglang #1779", "vllm #38436"),
)
LENGTHS = Rule("lengths", _lengths, "seq_len - q_len wraps below zero", ("sglang #24863", "sglang #1469"))
MASKED_ROWS = Rule(
    "masked_rows", _masked_rows, "a query that sees nothing has no defined answer", ("flashinfer #4452",)
)
TABLE_WIDTH = Rule(
    "table_width",
    _table_width,
    "the next request's pages are read, and memory past the table's end",
    ("sglang #24863", "sglang #35985", "sglang #19016"),
)
SPLIT_WIDTH = Rule(
    "split_width", _split_width, "another KV split than the proven one runs", ("flashinfer #4647",)
)
TABLE_MULTIPLE = Rule(
    "table_multiple", _table_multiple, "the last tile's entries lie past the row", ("vllm #39324",)
)
MAX_SEQ_LEN = Rule(
    "max_seq_len", _max_seq_len, "another kernel, or split, than the proven one runs", ("flashinfer #4647",)
)
TABLE_ENTRIES = Rule(
    "table_entries",
    _table_entries,
    "token slots, or another pool's ids, are followed out of the pool",
    ("sglang #26957", "sglang #32902", "sglang #38187"),
    full=True,
)
