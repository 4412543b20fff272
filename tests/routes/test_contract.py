"""The rules for every kernel: each is broken alone, by a step that is right in every other respect."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from autotune.arena.operands import QueryStride, Recipe, build, capacity_of
from autotune.arena.plain import PlainArena
from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.shape import KvLayout, Shape
from autotune.routes.base import Capacity, Step
from autotune.routes.contract import RULES, ContractError, Level, check_step

SHAPE = Shape(8, 2, 64, 16)
COLUMN = Column(SHAPE, DTypes("fp32", "fp32", "fp32"), 4, 3, 256)
LENS = (100, 4, 256)


@dataclass
class Case:
    capacity: Capacity
    step: Step
    out: torch.Tensor
    options: dict[str, Any]

    def check(self, level: Level | str = Level.FULL) -> None:
        check_step(self.capacity, self.step, level=level, out=self.out, **self.options)


def made(column: Column = COLUMN, lens: tuple[int, ...] = LENS, **recipe: Any) -> Case:
    with PlainArena() as arena:
        operands = build(arena, column, Recipe(lens, 1, table_garbage=-1, **recipe), "cpu")
    return Case(capacity_of(column, operands.recipe, "cpu"), operands.step, operands.out, {})


@pytest.fixture
def case() -> Iterator[Case]:
    fresh = made()
    fresh.check()
    yield fresh


def set_step(**values: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        for name, value in values.items():
            setattr(case.step, name, value(getattr(case.step, name)) if callable(value) else value)

    return change


def set_column(**values: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        column = dataclasses.replace(case.capacity.column, **values)
        case.capacity = dataclasses.replace(case.capacity, column=column)

    return change


def shorter_host_lens(case: Case) -> None:
    case.step.host_kv_lens = (100, 4)


def length_below_q_len(case: Case) -> None:
    case.step.host_kv_lens = (100, 3, 256)
    case.step.seq_lens[1] = 3


def empty_row(case: Case) -> None:
    case.step.host_kv_lens = (100, 0, 256)
    case.step.seq_lens[1] = 0


def negative_row(case: Case) -> None:
    case.step.host_kv_lens = (100, -1, 256)
    case.step.seq_lens[1] = -1


def no_host_lens_and_narrow(case: Case) -> None:
    """The lengths are the device's, and the longest of them fits into what is left of the table."""
    case.step.host_kv_lens = None
    case.step.seq_lens[2] = 257  # what a full check reads
    case.step.page_table = case.step.page_table[:, :15].contiguous()


def negative_page(case: Case) -> None:
    case.step.page_table[2, 0] = -1


def past_the_pool(case: Case) -> None:
    case.step.page_table[2, 0] = case.capacity.num_pages


def too_long(case: Case) -> None:
    case.step.host_kv_lens = (100, 4, 273)
    case.step.seq_lens[2] = 273


def too_long_for_the_context(case: Case) -> None:
    case.step.page_table = torch.cat([case.step.page_table, torch.zeros((3, 1), dtype=torch.int32)], dim=1)
    case.step.host_kv_lens = (100, 4, 257)
    case.step.seq_lens[2] = 257


def token_slot_for_page(case: Case) -> None:
    case.step.page_table[0, 6] *= 16
    case.step.page_table[0, 6] += case.capacity.num_pages


def strided_last(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] * 2), dtype=tensor.dtype)
    return wide[..., ::2]


def spread_heads(tensor: torch.Tensor) -> torch.Tensor:
    rows, heads, dim = tensor.shape
    return torch.zeros((rows, heads, 2 * dim))[..., :dim]


def other_strides(tensor: torch.Tensor) -> torch.Tensor:
    pages, page, heads, dim = tensor.shape
    return torch.zeros((pages, page, heads + 1, dim))[:, :, :heads]


def packed_rows(case: Case) -> None:
    """What vLLM 0.33 hands over, where a pool with K and V apart was proven."""
    rows = torch.zeros((*case.step.k.shape[:-1], 128))
    case.step.k, case.step.v = rows[..., :64], rows[..., 64:]


def two_packed_pools(case: Case) -> None:
    set_column(shape=dataclasses.replace(SHAPE, kv_layout="packed-nhd"))(case)
    packed_rows(case)
    case.step.v = torch.zeros((*case.step.k.shape[:-1], 128))[..., 64:]


def far(case: Case) -> None:
    case.options["max_offset"] = (case.capacity.num_pages - 1) * case.step.k.stride(0) - 1


def many_requests(case: Case) -> None:
    """A step that only a launch grid is too small for; nothing of it is ever written."""
    batch = 65536
    case.capacity = Capacity(
        Column(Shape(1, 1, 1, 1), COLUMN.dtypes, 1, batch, 1), max_batch_size=batch, num_pages=1, device="cpu"
    )
    case.step = Step(
        q=torch.zeros((batch, 1, 1)),
        k=torch.zeros((1, 1, 1, 1)),
        v=torch.zeros((1, 1, 1, 1)),
        page_table=torch.zeros((batch, 1), dtype=torch.int32),
        seq_lens=torch.ones(batch, dtype=torch.int32),
        host_kv_lens=None,
        q_len=1,
        sm_scale=1.0,
        k_scale=1.0,
        v_scale=1.0,
        max_seq_len=1,
    )
    case.out = torch.zeros((batch, 1, 1))


def set_out(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        case.out = change(case.out)

    return apply


def opened_for(**values: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.capacity = dataclasses.replace(case.capacity, **values)

    return change


# rule, what is done to a right step, what the message says, whether host values alone show it
# Rules that hold without a word from the caller about his kernel, his buffers or his machine.
GENERAL = {
    *("batch", "rows", "heads", "dtypes", "device", "page_table", "seq_lens", "empty_rows", "lengths"),
    *("table_width", "max_seq_len", "table_entries", "strides", "layout", "scales", "sinks", "grid"),
    *("far_pages", "out", "block_scales"),
}


BROKEN: list[tuple[str, Callable[[Case], None], str, bool]] = [
    ("batch", opened_for(max_batch_size=2), "3 requests; the session was opened for 1..2", True),
    ("batch", set_step(seq_lens=lambda t: t[:, None]), r"seq_lens has shape \(3, 1\)", True),
    ("batch", set_step(seq_lens=lambda t: t[:0]), "0 requests", True),
    ("rows", set_step(q=lambda t: t[:-1]), r"q has shape \(11, 8, 64\).* exactly 12 rows", True),
    ("rows", set_step(q_len=3), "q_len is 3; the session was opened for 4", True),
    ("heads", set_step(q=lambda t: t[:, :4].contiguous()), r"q has shape \(12, 4, 64\)", True),
    ("heads", set_step(v=lambda t: t[..., :32]), "v has shape", True),
    ("heads", opened_for(num_pages=7), r"k has shape .* opened for \(7, 16, 2, 64\)", True),
    ("dtypes", set_step(k=lambda t: t.bfloat16()), "k is torch.bfloat16; .* for fp32", True),
    ("dtypes", set_step(q=lambda t: t.double()), "q is torch.float64", True),
    ("device", set_step(page_table=lambda t: t.to("meta")), "page_table is on meta, q on cpu", True),
    ("device", set_out(lambda t: t.to("meta")), "out is on meta", True),
    ("page_table", set_step(page_table=lambda t: t[:2]), r"page_table has shape \(2, 16\)", True),
    ("page_table", set_step(page_table=lambda t: t.reshape(-1)), r"page_table has shape \(48,\)", True),
    ("page_table", set_step(page_table=lambda t: t.long()), "page_table is torch.int64; int32", True),
    ("page_table", set_step(page_table=lambda t: t.t().contiguous().t()), "must be contiguous", True),
    ("seq_lens", set_step(seq_lens=lambda t: t.long()), "seq_lens is torch.int64", True),
    ("seq_lens", set_step(seq_lens=lambda t: t.repeat_interleave(2)[::2]), "seq_lens has stride", True),
    ("seq_lens", shorter_host_lens, "host_kv_lens has 2 lengths for 3 requests", True),
    ("seq_lens", set_step(host_kv_lens=(100, 5, 256)), r"host_kv_lens\[1\] is 5, seq_lens\[1\] is 4", False),
    ("lengths", length_below_q_len, r"seq_lens\[1\] is 3, below q_len 4.*no row may be padded", True),
    ("empty_rows", empty_row, r"seq_lens\[1\] is 0; an empty row is legal only as a proven pad value", True),
    ("empty_rows", negative_row, r"seq_lens\[1\] is -1", True),
    ("table_width", no_host_lens_and_narrow, "15 pages of 16 tokens wide", True),
    ("table_width", too_long, "16 pages of 16 tokens wide; the longest request has 273", True),
    ("table_width", set_step(page_table=lambda t: t[:, :15].contiguous()), "15 pages", True),
    ("max_seq_len", set_step(max_seq_len=512), "max_seq_len is 512; the session was opened for 256", True),
    ("max_seq_len", too_long_for_the_context, "longest request has 257 tokens, max_seq_len is 256", True),
    ("table_entries", token_slot_for_page, r"page_table\[0, 6\] is \d+; the pool has pages 0\.\.", False),
    ("table_entries", negative_page, r"page_table\[2, 0\] is -1; the pool has pages 0\.\.", False),
    ("table_entries", past_the_pool, r"page_table\[2, 0\] is \d+; the pool has pages 0\.\.", False),
    ("strides", set_step(q=strided_last), r"q has strides .* the last must be 1", True),
    ("strides", set_step(q=spread_heads), "heads must be 64 elements apart", True),
    ("strides", set_step(v=other_strides), "k has strides .* they must be equal", True),
    (
        "layout",
        set_column(shape=dataclasses.replace(SHAPE, kv_layout="fused-hnd")),
        "not a fused-hnd pool",
        True,
    ),
    ("layout", packed_rows, "rows of a fused-nhd pool are 64 elements apart", True),
    (
        "layout",
        set_column(shape=dataclasses.replace(SHAPE, kv_layout="packed-nhd")),
        "rows of a packed-nhd pool are 128 elements apart",
        True,
    ),
    ("layout", two_packed_pools, "v does not begin 64 elements after k", True),
    ("scales", set_step(k_scale=0.5), "k_scale is 0.5; a fp32 KV cache has no scale", True),
    ("scales", set_step(v_scale=2.0), "v_scale is 2.0", True),
    ("scales", set_step(sm_scale=0.0), "sm_scale is 0.0; it must be positive", True),
    ("scales", set_step(sm_scale=math.nan), "sm_scale is nan", True),
    ("sinks", set_step(sinks=torch.zeros(8)), "sinks are given; the session was opened without", True),
    (
        "sinks",
        set_column(shape=dataclasses.replace(SHAPE, sinks=True)),
        "sinks are None; the session was opened with sinks",
        True,
    ),
    (
        "block_scales",
        set_step(kv_block_scales=(torch.ones(1), torch.ones(1))),
        "kv_block_scales are given; a fp32 KV cache has none",
        True,
    ),
    ("grid", many_requests, "batch_size is 65536; a launch grid ends at 65535", True),
    ("far_pages", far, "elements into the pool; proven are", True),
    ("out", set_out(lambda t: t[:-1]), r"out is \(11, 8, 64\)", True),
    ("out", set_out(lambda t: t.bfloat16()), "torch.bfloat16; .* fp32 is needed", True),
    ("out", set_out(strided_last), "out has strides", True),
]


@pytest.mark.parametrize(("rule", "change", "message", "static"), BROKEN)
def test_a_broken_rule_is_named(
    case: Case, rule: str, change: Callable[[Case], None], message: str, static: bool
) -> None:
    change(case)
    with pytest.raises(ContractError, match=f"contract rule {rule}: .*{message}") as caught:
        case.check(Level.FULL)
    assert caught.value.rule == rule and "\n" not in str(caught.value)
    if static:
        with pytest.raises(ContractError, match=f"contract rule {rule}: .*{message}"):
            case.check(Level.STATIC)
    else:
        case.check(Level.STATIC)


def test_every_rule_is_broken_by_some_test() -> None:
    assert {rule for rule, *_ in BROKEN} == GENERAL


def test_no_general_rule_asks_for_a_kernel_or_for_what_was_not_said(case: Case) -> None:
    assert {rule.name for rule in RULES} >= GENERAL and len(RULES) == len({rule.name for rule in RULES})
    assert all(rule.why and "\n" not in rule.why for rule in RULES)


@pytest.mark.parametrize("layout", [layout.value for layout in KvLayout])
@pytest.mark.parametrize("stride", QueryStride)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_an_engine_hands_over_is_taken(layout: str, stride: QueryStride, dtype: str) -> None:
    shape = dataclasses.replace(SHAPE, kv_layout=layout)
    made(Column(shape, DTypes(dtype, dtype, dtype), 4, 3, 256), query_stride=stride).check()


def test_unequal_head_dims_may_have_unequal_strides() -> None:
    shape = Shape(8, 2, 64, 16, head_dim_vo=32, kv_layout="separate-nhd")
    made(dataclasses.replace(COLUMN, shape=shape)).check()


def test_a_quantised_cache_takes_scales() -> None:
    case = made(dataclasses.replace(COLUMN, dtypes=DTypes("bf16", "e4m3", "bf16")))
    case.step.k_scale, case.step.v_scale = 0.5, 2.0
    case.check()
    case.step.k_scale = -0.5
    with pytest.raises(ContractError, match=r"k_scale is -0\.5"):
        case.check()


def test_padded_rows_need_the_proven_pad_value() -> None:
    case = made(lens=(100, 1, 256))
    case.options["pad_value"] = 1
    case.check()
    case.options["pad_value"] = 2
    with pytest.raises(ContractError, match="padded rows have 2"):
        case.check()


def test_garbage_past_the_live_pages_is_not_looked_at(case: Case) -> None:
    case.step.page_table[1, 1:] = 2**31 - 1
    case.check()


def test_static_reads_no_tensor_and_full_trusts_no_host_value() -> None:
    case = made()
    case.step.host_kv_lens = None
    case.check(Level.STATIC)
    case.step.seq_lens[0] = 1000
    case.check(Level.STATIC)
    with pytest.raises(ContractError, match="rule table_width"):
        case.check(Level.FULL)
    meta = {name: getattr(case.step, name).to("meta") for name in ("q", "k", "v", "page_table", "seq_lens")}
    case.step = dataclasses.replace(case.step, **meta)
    case.capacity = dataclasses.replace(case.capacity, device="meta")
    case.out = case.out.to("meta")
    case.check("static")


def test_lengths_on_the_host_may_come_in_a_list(case: Case) -> None:
    lens: Any = case.step.seq_lens.tolist()
    case.step.host_kv_lens = lens
    case.check()
    lens[1] += 1
    with pytest.raises(ContractError, match=rf"host_kv_lens\[1\] is {lens[1]}, seq_lens\[1\] is"):
        case.check()


def test_an_unknown_level_is_an_error(case: Case) -> None:
    with pytest.raises(ValueError, match="quick"):
        case.check("quick")


def test_static_lengths_on_the_device_are_taken_at_their_worst(case: Case) -> None:
    case.step.host_kv_lens = None
    case.step.seq_lens[2] = 16  # fits; a captured graph is replayed with other lengths
    case.step.page_table = case.step.page_table[:, :15].contiguous()
    with pytest.raises(ContractError, match=r"15 pages .* may reach max_seq_len 256"):
        case.check(Level.STATIC)
    case.check(Level.FULL)


def test_a_row_of_no_tokens_is_legal_where_it_was_proven(case: Case) -> None:
    empty_row(case)
    case.options["pad_value"] = 0
    case.check()


def test_a_refusal_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ContractError("rows", "3 of them")))
    assert (error.rule, str(error)) == ("rows", "contract rule rows: 3 of them")


def test_importing_the_contract_imports_the_domain_and_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import autotune.routes.contract\n"
        "new = set(sys.modules) - before - {'autotune', 'autotune.routes'}\n"
        "new = [n for n in new if n.split('.')[0] not in sys.stdlib_module_names]\n"
        "bad = [n for n in new if not n.startswith(('autotune.domain', 'autotune.routes.contract'))]\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
