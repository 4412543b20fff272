"""What sessions do to a step before the library sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.domain.cell import Column
from autotune.routes.contract import ContractError
from autotune.routes.flashinfer.example import example_step
from autotune.routes.flashinfer.fa_decode import Fa2Decode
from autotune.routes.flashinfer.fa_prefill import Fa2, Fa3
from autotune.routes.flashinfer.fmha_v2 import FmhaV2, pool
from autotune.routes.flashinfer.layout import block_delta, canonical, hnd
from autotune.routes.flashinfer.planned import page_lists
from autotune.routes.flashinfer.trtllm_gen import (
    TrtllmGenContext,
    TrtllmGenDecode,
    TrtllmGenDecodeRagged,
    counter_bytes,
)
from autotune.routes.flashinfer.xqa import SEMAPHORE_BYTES, XqaDecode, hopper_fp8

MakeColumn = Callable[..., Column]


def test_a_graph_finds_every_step_at_the_same_addresses(make_column: MakeColumn, recorder: Any) -> None:
    column = make_column()
    session = recorder.open(XqaDecode(), column)
    seen = []
    for lens in ((70, 130), (64, 400)):
        step, out = example_step(column, lens)
        session.prepare(step)
        session.run(out)
        call = recorder.calls[-1].kwargs
        seen.append((call["seq_lens"].data_ptr(), call["block_tables"].data_ptr()))
        assert call["seq_lens"].tolist() == list(lens)
        assert torch.equal(call["block_tables"], step.page_table)
        assert call["seq_lens"].data_ptr() != step.seq_lens.data_ptr()
        assert call["query"] is step.q and call["out"] is out
    assert seen[0] == seen[1]


def test_a_smaller_batch_uses_the_first_rows(make_column: MakeColumn, recorder: Any) -> None:
    column = make_column()
    session = recorder.open(XqaDecode(), column, batch=3)
    step, out = example_step(column, (70,))
    session.prepare(step)
    session.run(out)
    call = recorder.calls[-1].kwargs
    assert call["seq_lens"].shape == (1,) and call["mask"].shape == (1, 4, 2)
    assert call["block_tables"].shape == (1, column.table_width) and call["block_tables"].is_contiguous()


def test_a_table_of_another_width_keeps_its_width(make_column: MakeColumn, recorder: Any) -> None:
    column = make_column()
    session = recorder.open(XqaDecode(), column)
    step, out = example_step(column, (70, 130))
    step.page_table = step.page_table[:, :2].contiguous()
    session.prepare(step)
    session.run(out)
    assert recorder.calls[-1].kwargs["block_tables"].shape == (2, 2)


@pytest.mark.parametrize("route", [XqaDecode(), TrtllmGenDecode(), FmhaV2(), Fa2()])
def test_rows_that_are_not_batch_times_q_len_are_refused(
    route: Any, make_column: MakeColumn, recorder: Any
) -> None:
    column = make_column()
    session = recorder.open(route, column)
    step, _ = example_step(column, (70, 130))
    step.q = step.q[:-1]
    with pytest.raises(ContractError, match="7 rows"):
        session.prepare(step)
    too_many, _ = example_step(column, (70, 130, 70))
    with pytest.raises(ContractError, match="exceeds the session's 2"):
        session.prepare(too_many)


def test_xqa_call(make_column: MakeColumn, recorder: Any) -> None:
    (call,) = recorder.launch(XqaDecode(), make_column(window_left=127))
    kwargs = call.kwargs
    assert kwargs["backend"] == "xqa" and kwargs["kv_layout"] == "HND" and kwargs["q_len_per_req"] == 4
    assert kwargs["window_left"] == 127
    assert kwargs["mask"].dtype == torch.uint16 and kwargs["mask"].shape == (2, 4, 2)
    assert not kwargs["workspace_buffer"][:SEMAPHORE_BYTES].any()
    k, v = kwargs["kv_cache"]
    assert k.shape[1:] == (1, 64, 128) and k.stride() == v.stride() == (64 * 128, 64 * 128, 128, 1)
    assert recorder.launch(XqaDecode(), make_column(q_len=1))[-1].kwargs["mask"] is None


@pytest.mark.parametrize(
    ("kwargs", "major", "hopper"),
    [
        ({"kv": "e4m3", "q_len": 1}, 9, True),
        ({"kv": "e4m3", "q_len": 4}, 9, False),  # 4 x 8 = 32
        ({"kv": "e4m3", "q_len": 5}, 9, True),
        ({"kv": "e4m3", "q_len": 5, "window_left": 0}, 9, False),
        ({"kv": "e4m3", "q_len": 5, "sinks": True}, 9, False),
        ({"kv": "e4m3", "q_len": 5}, 10, False),
        ({"kv": "bf16", "q_len": 5}, 9, False),
    ],
)
def test_which_xqa_kernel_runs(
    kwargs: dict[str, Any], major: int, hopper: bool, make_column: MakeColumn
) -> None:
    assert hopper_fp8(make_column(**kwargs), major) is hopper


def test_a_strided_query_is_copied_inside_the_launch(make_column: MakeColumn, recorder: Any) -> None:
    column = make_column()
    session = recorder.open(XqaDecode(), column)
    step, out = example_step(column, (70, 130))
    packed = torch.zeros((8, 10, 128), dtype=torch.bfloat16)
    step.q = packed[:, :8]
    session.prepare(step)
    packed.fill_(3.0)  # the next layer's query, written between prepare and run
    session.run(out)
    query = recorder.calls[-1].kwargs["query"]
    assert query.is_contiguous() and query.shape == step.q.shape and torch.equal(query, step.q)


@pytest.mark.parametrize("route", [TrtllmGenDecode(), FmhaV2(), Fa3()])
def test_an_fp8_cache_gets_an_fp8_query_inside_the_launch(
    route: Any, make_column: MakeColumn, recorder: Any
) -> None:
    column = make_column(kv="e4m3")
    session = recorder.open(route, column)
    step, out = example_step(column, (70, 130))
    session.prepare(step)
    step.q.fill_(1.5)
    session.run(out)
    call = recorder.calls[-1]
    query = call.args[0] if call.args else call.kwargs.get("query", call.kwargs.get("qkv", [None])[0])
    assert query.dtype == torch.float8_e4m3fn and bool((query.float() == 1.5).all())


def test_xqa_and_fa2_keep_a_16_bit_query_with_an_fp8_cache(make_column: MakeColumn, recorder: Any) -> None:
    column = make_column(kv="e4m3")
    assert recorder.launch(XqaDecode(), column)[-1].kwargs["query"].dtype == torch.bfloat16
    assert recorder.launch(Fa2(), column)[-1].kwargs["q"].dtype == torch.bfloat16


def test_trtllm_gen_calls(make_column: MakeColumn, recorder: Any) -> None:
    column = make_column()
    uniform = recorder.launch(TrtllmGenDecode(), column)[-1].kwargs
    ragged = recorder.launch(TrtllmGenDecodeRagged(), column)[-1].kwargs
    context = recorder.launch(TrtllmGenContext(), column)[-1].kwargs
    assert uniform["max_seq_len"] == 512 and uniform["q_len_per_req"] == 4
    assert uniform["cum_seq_lens_q"] is None and uniform["max_q_len"] is None
    assert ragged["q_len_per_req"] is None and ragged["max_q_len"] == 4
    assert ragged["cum_seq_lens_q"].tolist() == [0, 4, 8]
    assert context["cum_seq_lens_q"].tolist() == [0, 4, 8] and context["max_kv_len"] == 512
    assert context["cum_seq_lens_kv"].tolist() == [0, 70, 200] and context["causal"] is True
    for kwargs in (uniform, ragged, context):
        assert not kwargs["multi_ctas_kv_counter_buffer"].any()


@pytest.mark.parametrize(("batch", "heads"), [(1, 8), (3, 8), (64, 8), (256, 32), (255, 3)])
def test_counter_buffer_is_large_enough(batch: int, heads: int) -> None:
    for sms in (132, 148, 160):
        # flashinfer/utils.py: get_trtllm_gen_multi_ctas_kv_counter_bytes
        assert counter_bytes(batch, heads) >= -(-max(batch * heads, sms) // 8) * 8 * 4


def test_nvfp4_cache_writes_fp8_and_converts_in_the_launch(make_column: MakeColumn, recorder: Any) -> None:
    (call,) = recorder.launch(TrtllmGenDecode(), make_column(kv="nvfp4", layout="fused-hnd"))
    assert call.kwargs["out"].dtype == torch.float8_e4m3fn
    k_sf, v_sf = call.kwargs["kv_cache_sf"]
    assert k_sf.shape[1:] == (1, 64, 8) and k_sf.stride()[-2:] == v_sf.stride()[-2:] == (8, 1)
    assert call.kwargs["kv_cache"][0].dtype == torch.uint8


@pytest.mark.parametrize("layout", ["fused-nhd", "fused-hnd", "interleaved-nhd", "interleaved-hnd"])
def test_fmha_v2_finds_v_from_k(layout: str, make_column: MakeColumn, recorder: Any) -> None:
    column = make_column(heads=(16, 2, 128), layout=layout)
    step, out = example_step(column, (70, 130))
    step.k.copy_(torch.randn(step.k.shape))
    step.v.copy_(torch.randn(step.v.shape))
    session = recorder.open(FmhaV2(), column)
    session.prepare(step)
    session.run(out)
    kwargs = recorder.calls[-1].kwargs
    k_pages, v_pages = step.k.shape[0], step.v
    swap = layout.endswith("hnd")
    assert kwargs["input_layout"] == ("Q_PAGED_KV_HND" if swap else "Q_PAGED_KV_NHD")
    cache, table = kwargs["qkv"][1], kwargs["block_tables"]
    for row, live in ((0, 2), (1, 3)):
        for page in range(live):
            number = int(step.page_table[row, page])
            if layout.startswith("fused"):
                k, _ = cache
                assert table.shape == (2, 2, column.table_width) and int(table[row, 0, page]) == number
                # the kernel counts pages from K's start
                flat = k.as_strided((2 * k_pages, *k.shape[1:]), k.stride())
                found = flat[int(table[row, 1, page])]
            else:
                assert table.shape == (2, column.table_width)
                found = cache[number, 1]
            assert torch.equal(found.transpose(0, 1) if swap else found, v_pages[number])
    assert kwargs["mask_mode"] == "causal" and kwargs["cum_seq_lens_kv"].tolist() == [0, 70, 200]


def test_fmha_v2_refuses_pools_it_would_misread(make_column: MakeColumn) -> None:
    step, _ = example_step(make_column(layout="separate-nhd"), (70, 130))
    with pytest.raises(ValueError, match="not the halves"):
        pool(step, "interleaved-nhd")
    with pytest.raises(ValueError, match="after K"):
        block_delta(step.v, step.v)


def test_canonical_strides_of_one_kv_head() -> None:
    view = torch.zeros((4, 64, 1, 128)).transpose(1, 2)
    assert view.stride() == (8192, 128, 128, 1)
    assert canonical(view).stride() == (8192, 8192, 128, 1)
    many = torch.zeros((4, 64, 2, 128))
    assert hnd(many).stride() == (16384, 128, 256, 1) and hnd(many).data_ptr() == many.data_ptr()


def test_page_lists_hold_live_pages_only(make_column: MakeColumn) -> None:
    column = make_column(batch=3)
    step, _ = example_step(column, (64, 65, 1))
    step.page_table = torch.full((3, 8), -1, dtype=torch.int32)
    step.page_table[0, 0], step.page_table[1, 0], step.page_table[1, 1], step.page_table[2, 0] = 9, 4, 7, 2
    lists = page_lists(step, 64)
    assert lists.indptr.tolist() == [0, 1, 3, 4] and lists.indices.tolist() == [9, 4, 7, 2]
    assert lists.last_page_len.tolist() == [64, 1, 1] and lists.indices.dtype == torch.int32


def test_page_lists_refuse_what_they_cannot_know(make_column: MakeColumn) -> None:
    step, _ = example_step(make_column(), (70, 130))
    step.page_table = step.page_table[:, :2].contiguous()
    with pytest.raises(ContractError, match="needs 3 pages and the page table holds 2"):
        page_lists(step, 64)
    step.host_kv_lens = None
    with pytest.raises(ContractError, match="host"):
        page_lists(step, 64)


def test_wrappers_open_in_graph_mode_with_our_buffers_one_a_batch_size(
    make_column: MakeColumn, recorder: Any
) -> None:
    column = make_column(batch=3)
    session = recorder.open(Fa2(), column)
    for lens in ((70, 130, 64), (70, 130), (64, 65, 66)):
        step, out = example_step(column, lens)
        session.prepare(step)
        session.run(out)
    opened = [call for call in recorder.calls if call.target.endswith("__init__")]
    assert [len(call.kwargs["qo_indptr_buf"]) - 1 for call in opened] == [3, 2]
    # by name: what "auto" means has changed between releases
    assert all(call.kwargs["use_cuda_graph"] is True and call.kwargs["backend"] == "fa2" for call in opened)
    assert opened[0].kwargs["paged_kv_indices_buf"].shape == (3 * column.table_width,)
    plans = [call.kwargs for call in recorder.calls if call.target.endswith("plan")]
    assert len(plans) == 3 and plans[0]["causal"] is True and plans[0]["qo_indptr"].tolist() == [0, 4, 8, 12]
    assert session._wrapper.integers.numel() == 8 * 2**20


def test_fa3_passes_fp8_scales_by_position(make_column: MakeColumn, recorder: Any) -> None:
    column = make_column(kv="e4m3")
    step, out = example_step(column, (70, 130))
    step.k_scale, step.v_scale = 0.5, 2.0
    session = recorder.open(Fa3(), column)
    session.prepare(step)
    session.run(out)
    call = recorder.calls[-1]
    assert call.args[2:] == (1.0, 0.5, 2.0) and "k_scale" not in call.kwargs
    plan = next(call for call in recorder.calls if call.target.endswith("plan")).kwargs
    assert plan["q_data_type"] == torch.float8_e4m3fn and plan["o_data_type"] == torch.bfloat16


def test_decode_wrapper_refuses_rows_shorter_than_q_len(make_column: MakeColumn, recorder: Any) -> None:
    column = make_column()
    session = recorder.open(Fa2Decode(), column)
    step, _ = example_step(column, (70, 3))
    with pytest.raises(ContractError, match="kv_len 3 is below q_len 4"):
        session.prepare(step)
    calls = recorder.launch(Fa2Decode(), column)
    opened = next(call for call in reversed(calls) if call.target.endswith("__init__")).kwargs
    assert opened["use_tensor_cores"] is True and opened["backend"] == "fa2"
    assert next(call for call in reversed(calls) if call.target.endswith("plan")).kwargs["q_len_per_req"] == 4


def test_run_before_prepare_says_so(make_column: MakeColumn, recorder: Any) -> None:
    for route in (XqaDecode(), Fa2()):
        with pytest.raises(RuntimeError, match="before prepare"):
            recorder.open(route, make_column()).run(torch.zeros(1))
