"""The emulated launcher against the oracle, from arguments as FlashInfer passes them; needs no FlashInfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.arena.base import Placement
from autotune.arena.host_mmap import HostMmapArena
from autotune.arena.operands import Operands, QueryStride, Recipe, build
from autotune.checks import oracle
from autotune.domain.cell import Column
from autotune.domain.verdict import FailureKind
from autotune.routes.flashinfer.emulation.arguments import LauncherError, named
from autotune.routes.flashinfer.emulation.launcher import Launchers, launch
from autotune.routes.flashinfer.emulation.params import LOG2E, derive, splits
from autotune.worker.base import Failed
from autotune.worker.worker import Worker
from tests.routes.flashinfer import launcher_calls
from tests.routes.flashinfer.launcher_calls import call_of, error_of, function_of, positional

MakeColumn = Callable[..., Column]
KV_LENS = (20, 131, 600)
# One rounding of a bf16 output, and fp32 arithmetic.
ROUNDING = 2.0**-8
E4M3 = {"q": "e4m3", "kv": "e4m3"}
NVFP4 = {"q": "e4m3", "kv": "nvfp4", "layout": "fused-hnd"}

torch.set_num_threads(1)


@pytest.fixture(params=list(Placement), ids=lambda placement: placement.value)
def arena(request: pytest.FixtureRequest) -> Iterator[HostMmapArena]:
    with HostMmapArena(request.param) as made:
        yield made


@pytest.fixture
def tail() -> Iterator[HostMmapArena]:
    with HostMmapArena() as made:
        yield made


@pytest.fixture(scope="module")
def column_of(make_column: MakeColumn) -> MakeColumn:
    """A column of small pages and a batch of three."""

    def make(**changes: Any) -> Column:
        return make_column(**{"page": 16, "batch": 3, "context": 640, **changes})

    return make


def operands_of(arena: HostMmapArena, column: Column, **recipe: Any) -> Operands:
    wanted = {"kv_lens": KV_LENS, "seed": 7, **recipe}
    return build(arena, column, Recipe(**wanted), "cpu")


@pytest.mark.parametrize("route", ["decode", "ragged", "context"])
@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ({}, {}),
        ({"q_len": 1, "heads": (32, 2, 256), "layout": "interleaved-nhd"}, {}),
        ({"window_left": 40, "sinks": True}, {}),
        ({"heads": (8, 2, 64), "q": "fp16", "kv": "fp16", "out": "fp16", "layout": "separate-hnd"}, {}),
        (E4M3, {"k_scale": 0.7, "v_scale": 1.4}),
        ({**NVFP4, "heads": (8, 2, 128)}, {"k_scale": 0.7, "v_scale": 1.4, "interleaved_v_scales": True}),
        ({**NVFP4, "q_len": 1, "heads": (32, 2, 256)}, {"interleaved_v_scales": True}),
    ],
    ids=["bf16", "q1-256", "window-sinks", "fp16", "e4m3", "nvfp4", "nvfp4-256"],
)
def test_is_the_oracles_attention(
    arena: HostMmapArena, column_of: MakeColumn, route: str, changes: dict[str, Any], recipe: dict[str, Any]
) -> None:
    operands = operands_of(arena, column_of(**changes), **recipe)
    call = call_of(operands, route, arena)
    for older in (False, True):
        operands.out.fill_(float("nan"))
        assert error_of(operands, positional(call, operands.out, older=older), function_of(call)) < ROUNDING
    assert arena.overwritten() == []
    # what the kernel resets, it resets
    assert not call.kwargs["multi_ctas_kv_counter_buffer"].any()


def test_the_query_s_strides_are_read(tail: HostMmapArena, column_of: MakeColumn) -> None:
    operands = operands_of(tail, column_of(), query_stride=QueryStride.PACKED_QKV)
    assert not operands.step.q.is_contiguous()
    call = call_of(operands, "decode", tail)
    assert error_of(operands, positional(call, operands.out), function_of(call)) < ROUNDING


def test_v_is_read_with_k_s_strides(tail: HostMmapArena, column_of: MakeColumn) -> None:
    operands = operands_of(tail, column_of(heads=(8, 2, 128), layout="separate-hnd"))
    step = operands.step
    pages, page, heads, dim = step.v.shape
    # V's rows are further apart than K's, all of it in one pool that is large enough for both
    whole = tail.tensor("v_cache", (pages, heads, page, dim + 16), torch.bfloat16)
    whole.copy_(torch.randn(whole.shape, generator=torch.Generator().manual_seed(3)))
    apart = whole[..., :dim].transpose(1, 2)
    step.v = apart
    call = call_of(operands, "decode", tail)
    assert call.kwargs["kv_cache"][0].stride() != call.kwargs["kv_cache"][1].stride()
    launch(function_of(call), positional(call, operands.out))
    assert oracle.worst(operands.out, oracle.reference(operands)).error > 0.1
    step.v = whole.flatten()[: step.k.numel()].as_strided(step.k.shape, step.k.stride())
    assert oracle.worst(operands.out, oracle.reference(operands)).error < ROUNDING


def test_v_s_block_scales_are_read_with_k_s_strides(tail: HostMmapArena, column_of: MakeColumn) -> None:
    operands = operands_of(tail, column_of(**NVFP4), interleaved_v_scales=True)
    call = call_of(operands, "decode", tail)
    params = derive(named(function_of(call), positional(call, operands.out)))
    k_scales, v_scales = call.kwargs["kv_cache_sf"]
    wide = torch.zeros((v_scales.shape[0], v_scales[0].numel() + 16), dtype=torch.uint8)
    spread = wide.view(torch.float8_e4m3fn)[:, :-16].view(v_scales.shape)
    assert spread.stride(0) != v_scales.stride(0)
    changed = replace(call, kwargs={**call.kwargs, "kv_cache_sf": (k_scales, spread)})
    other = derive(named(function_of(call), positional(changed, operands.out)))
    assert params.block_scales is not None and other.block_scales is not None
    assert other.block_scales.stride_pages == params.block_scales.stride_pages == k_scales.stride(0)


def test_uneven_queries_need_offsets(tail: HostMmapArena, column_of: MakeColumn) -> None:
    """Requests of 1, 4 and 3 queries: each as if it were alone, where the offsets say so."""
    lens = (1, 4, 3)
    column = column_of(q_len=4)
    operands = operands_of(tail, column)
    step = operands.step
    wanted = []
    for request, count in enumerate(lens):
        # the last queries of a request see what they saw among four
        rows = oracle.reference(operands)[4 * request + 4 - count : 4 * request + 4]
        wanted.append(rows)
    packed = torch.cat([step.q[4 * r + 4 - n : 4 * r + 4] for r, n in enumerate(lens)])
    out = tail.tensor("packed_out", tuple(packed.shape), torch.bfloat16)
    out.zero_()
    call = call_of(operands, "ragged", tail)
    offsets = torch.tensor([0, 1, 5, 8], dtype=torch.int32)
    ragged = replace(call, kwargs={**call.kwargs, "query": packed, "cum_seq_lens_q": offsets})
    launch(function_of(call), positional(ragged, out))
    assert oracle.worst(out, torch.cat(wanted)).error < ROUNDING

    # the uniform call takes the same 8 rows for two requests of 4
    uniform = call_of(operands, "decode", tail)
    uniform = replace(uniform, kwargs={**uniform.kwargs, "query": packed})
    args = positional(uniform, out)
    assert args[16] == 2
    launch(function_of(uniform), args)
    assert oracle.worst(out, torch.cat(wanted)).error > 0.1


def test_scales_on_the_device(tail: HostMmapArena, column_of: MakeColumn) -> None:
    operands = operands_of(tail, column_of(**E4M3), k_scale=0.7, v_scale=1.4)
    call = call_of(operands, "context", tail)
    # the library multiplies a tensor by log2 e before it hands it over
    bmm1 = torch.tensor([call.kwargs["bmm1_scale"] * LOG2E], dtype=torch.float32)
    bmm2 = torch.tensor([call.kwargs["bmm2_scale"]], dtype=torch.float32)
    on_device = replace(call, kwargs={**call.kwargs, "bmm1_scale": bmm1, "bmm2_scale": bmm2})
    assert error_of(operands, positional(on_device, operands.out), function_of(call)) < ROUNDING
    bmm1 /= LOG2E
    assert error_of(operands, positional(on_device, operands.out), function_of(call)) > 0.05


def test_tokens_past_the_bound_are_not_seen(tail: HostMmapArena, column_of: MakeColumn) -> None:
    column = column_of(context=640)
    operands = operands_of(tail, column, kv_lens=(64, 256, 600))
    call = call_of(operands, "decode", tail)
    bounded = replace(call, kwargs={**call.kwargs, "max_seq_len": 256})
    launch(function_of(call), positional(bounded, operands.out))
    error = torch.linalg.vector_norm(operands.out.double() - oracle.reference(operands), dim=-1)
    assert float(error[:8].max()) < 0.05 and float(error[8:].min()) > 0.05


@pytest.mark.parametrize(("left", "kind"), [(1, "early"), (-7, "never")])
def test_counters_that_are_not_zero(tail: HostMmapArena, column_of: MakeColumn, left: int, kind: str) -> None:
    operands = operands_of(tail, column_of())
    call = call_of(operands, "decode", tail)
    args = positional(call, operands.out)
    assert derive(named(function_of(call), args)).splits > 1
    counters = call.kwargs["multi_ctas_kv_counter_buffer"].view(torch.int32)
    counters[8:16] = left  # the second request's query heads
    operands.out.fill_(5.0)
    launch(function_of(call), args)
    rows = operands.out[4:8]
    if kind == "never":
        assert bool((rows == 5.0).all())
    else:  # merged before the last part was there: what the scratch held is NaN here
        assert not torch.isfinite(rows).any()
    others = torch.cat([operands.out[:4], operands.out[8:]])
    reference = oracle.reference(operands)
    assert oracle.worst(others, torch.cat([reference[:4], reference[8:]])).error < ROUNDING


def test_rows_that_see_nothing_are_zero(tail: HostMmapArena, column_of: MakeColumn) -> None:
    operands = operands_of(tail, column_of())
    operands.step.seq_lens[1] = 1
    operands.step.seq_lens[2] = 0
    for route in ("decode", "context"):
        call = call_of(operands, route, tail)
        operands.out.fill_(float("nan"))
        launch(function_of(call), positional(call, operands.out))
        seen = operands.out.abs().amax(dim=(1, 2)) > 0
        assert seen.tolist() == [True] * 4 + [False] * 3 + [True] + [False] * 4


def test_a_table_read_too_far_ends_the_process(column_of: MakeColumn) -> None:
    job = launcher_calls.NarrowTable(column_of().to_dict(), (20, 33, 100), 6)
    with Worker("cpu") as worker:
        outcome = worker.run(job, timeout_s=60)
        # as wide as it must be, it comes back
        wide = worker.run(replace(job, width=7), timeout_s=60)
    assert isinstance(outcome, Failed), outcome
    assert outcome.kind is FailureKind.ILLEGAL_ACCESS and outcome.step == "launch"
    assert outcome.fault is not None
    assert (outcome.fault.operand, outcome.fault.offset) == ("narrow_table", 0)
    assert getattr(wide, "value", wide) == "came back"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, torch.zeros(1), "out_scale_factor, which is not emulated"),
        (28, torch.zeros(1), "lse, which is not emulated"),
        (6, torch.zeros(8, dtype=torch.uint8), "counter buffer is too small: 8 bytes, needed are 608"),
        (6, torch.zeros(1024, dtype=torch.uint8)[8:], "16-byte aligned"),
        (2, torch.zeros((12, 8, 136), dtype=torch.bfloat16)[..., 1:129], "TMA descriptor of Q"),
        (2, torch.zeros((12, 7, 128), dtype=torch.bfloat16), None),
        (3, torch.zeros((4, 3, 16, 128), dtype=torch.bfloat16), r"V \(4, 1|K has shape"),
        (3, torch.zeros((4, 1, 16, 64), dtype=torch.bfloat16), "K has shape"),
        (2, torch.zeros((12, 8, 128)), r"query in torch.float32"),
        (22, torch.zeros(8, dtype=torch.float64), "attention_sinks must be a float tensor"),
    ],
)
def test_refuses_what_the_launcher_refuses(
    tail: HostMmapArena, column_of: MakeColumn, place: int, value: torch.Tensor, message: str | None
) -> None:
    operands = operands_of(tail, column_of())
    call = call_of(operands, "decode", tail)
    args = positional(call, operands.out)
    args[place] = value
    if message is None:  # seven query heads of one KV head: legal
        derive(named(function_of(call), args))
        return
    with pytest.raises(LauncherError, match=message):
        launch(function_of(call), args)


def test_a_meaningless_stride_breaks_the_descriptor(tail: HostMmapArena, column_of: MakeColumn) -> None:
    operands = operands_of(tail, column_of())
    call = call_of(operands, "context", tail)
    k, v = call.kwargs["kv_cache"]
    odd = k.as_strided(k.shape, (k.stride(0), 7, *k.stride()[2:]))
    args = positional(replace(call, kwargs={**call.kwargs, "kv_cache": (odd, v)}), operands.out)
    with pytest.raises(LauncherError, match="TMA descriptor of K"):
        launch(function_of(call), args)


def test_an_unknown_launcher_is_not_guessed_at(tail: HostMmapArena, column_of: MakeColumn) -> None:
    operands = operands_of(tail, column_of())
    call = call_of(operands, "decode", tail)
    args = positional(call, operands.out)
    with pytest.raises(LauncherError, match=r"37 arguments; emulated are 36 or 35"):
        launch(function_of(call), [*args, None])
    with pytest.raises(AttributeError, match="trtllm_ragged_attention is not emulated"):
        Launchers().trtllm_ragged_attention  # noqa: B018 - it is the look-up that fails


@pytest.mark.parametrize(
    ("batch", "kv_heads", "q_len", "max_kv_len", "expected"),
    [
        (1, 1, 1, 100, 1),
        (1, 1, 1, 512, 2),
        (1, 1, 1, 131072, 148),
        (8, 2, 4, 131072, 2),
        (64, 2, 4, 131072, 1),
    ],
)
def test_parts_fill_the_sms(batch: int, kv_heads: int, q_len: int, max_kv_len: int, expected: int) -> None:
    assert splits(batch, kv_heads, q_len, max_kv_len, 148) == expected
