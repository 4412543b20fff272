"""The vLLM plugin around a builder that decides as vLLM's does: by ``reorder_batch_threshold``."""

from __future__ import annotations

import enum
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.domain.decision import Decision, Reason
from autotune.domain.dtypes import DTypes
from autotune.domain.shape import Shape
from autotune.engines import vllm
from autotune.engines.choice import RefusedCallError
from autotune.engines.environment import Miss, Mode, Settings
from autotune.engines.runtime import Runtime
from autotune.engines.vllm import Plugin
from autotune.router import Router
from autotune.table.build import build_table
from autotune.table.dump import dump_table, write_table
from autotune.table.load import load_table
from autotune.table.model import Policy, Quarantine
from autotune.table.withdraw import withdraw
from tests.table.samples import CUDA_FACTS, GENERATED, decided

FASTER = Decision("xqa-decode", Reason.PROVEN_FASTER, "", 1.3, 1.4, 1.0)
SLOWER = Decision(None, Reason.NOT_FASTER, vs_stock=1.1)
# 16 tokens, one head, K and V of 128 elements in bf16
PAGE_BYTES = 16 * 1 * 2 * 128 * 2


class Kernel(enum.Enum):
    XQA = "xqa"


class Layout(enum.Enum):
    """vLLM's ``KVCacheLayout``: layers, blocks, tokens (N), heads and content in the order of memory."""

    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)
    BLNHC = (1, 0, 3, 2, 4)
    BHLNC = (1, 2, 0, 3, 4)


class Builder:
    """What ``FlashInferMetadataBuilder`` has that the hook reads; ``build`` says how it split the batch."""

    def __init__(self, **changes: Any) -> None:
        self.reorder_batch_threshold = 4
        self.num_qo_heads, self.num_kv_heads, self.head_dim, self.page_size = 8, 1, 128, 16
        self.window_left, self.has_sinks, self.logits_soft_cap = -1, False, None
        self.use_dcp = self.is_kvcache_nvfp4 = self.enable_cuda_graph = False
        self.kv_cache_layout = Layout.LBNHC
        self.kv_cache_dtype = self.q_data_type_prefill = torch.bfloat16
        self.use_trtllm_gen_varlen_decode = False
        self.kv_cache_spec = SimpleNamespace(page_size_bytes=PAGE_BYTES)
        self.flashinfer_trtllm_api_decode_kernel = Kernel.XQA
        self.model_config = SimpleNamespace(dtype=torch.bfloat16, max_model_len=512)
        self.fail_as_prefill: Exception | None = None
        self.__dict__.update(changes)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> str:
        decode = common_attn_metadata.max_query_len <= self.reorder_batch_threshold
        if not decode and self.fail_as_prefill is not None:
            raise self.fail_as_prefill
        return "decode" if decode else "prefill"


def batch(size: int, longest: int = 300, q_len: int = 4, **changes: Any) -> Any:
    """``CommonAttentionMetadata`` of a uniform batch."""
    fields = {
        "num_reqs": size,
        "max_query_len": q_len,
        "num_actual_tokens": size * q_len,
        "causal": True,
        "max_seq_len": longest,
        "seq_lens": torch.full((size,), longest, dtype=torch.int32),
        "block_table_tensor": torch.zeros((size, 32), dtype=torch.int32),
    }
    return SimpleNamespace(**fields | changes)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """``make(mode=..., miss=..., fallback=...)``: a hooked class of builders and its plugin."""

    def install(
        mode: Mode = Mode.ROUTE, miss: Miss = Miss.STOCK, fallback: str = "fa3"
    ) -> tuple[type, Plugin]:
        cells = [
            decided(
                size,
                row,
                decision,
                shape=Shape(8, 1, 128, 16, kv_layout="packed-nhd"),
                dtypes=DTypes("bf16", "bf16", "bf16"),
                max_context=512,
                fallback=fallback,
                pad_value=0,
            )
            for size, decisions in {1: (SLOWER, FASTER), 2: (FASTER, FASTER)}.items()
            for row, decision in zip(((4, 256), (257, 512)), decisions, strict=True)
        ]
        made = build_table(
            cells,
            facts=CUDA_FACTS,
            generated=GENERATED,
            policy=Policy("vllm", "xqa-decode", "graph", 0.03, 0.01, 0.05, pad_value=0),
            families={"xqa-decode": "decode", fallback: "context"},
        )
        path = tmp_path / "h200.vllm.yaml"
        path.write_bytes(dump_table(made))
        router = Router.load(path, facts=CUDA_FACTS)
        assert router.status.active, router.status.reason
        plugin = Plugin(lambda: Runtime(router, engine="vllm", mode=mode, miss=miss))
        cls = type("FlashInferMetadataBuilder", (Builder,), {"build": Builder.build})
        vllm.hook(cls, plugin)
        return cls, plugin

    return install


@pytest.mark.parametrize(
    ("size", "longest", "taken", "why"),
    [
        (1, 200, "prefill", "not_faster"),
        (1, 256, "prefill", "not_faster"),
        (1, 257, "decode", "proven_faster"),
        (2, 300, "decode", "proven_faster"),
        (3, 300, "decode", "batch_size_not_proven"),
    ],
)
def test_the_length_on_the_host_decides(make: Any, size: int, longest: int, taken: str, why: str) -> None:
    cls, plugin = make()
    builder = cls()
    assert builder.build(0, batch(size, longest)) == taken
    assert builder.build(common_prefix_len=0, common_attn_metadata=batch(size, longest)) == taken
    assert builder.reorder_batch_threshold == 4
    assert [reason for _, reason in plugin.runtime.counts] == [why]


@pytest.mark.parametrize(
    "changes",
    [
        {"q_len": 1},
        {"num_actual_tokens": 3},
        {"causal": False},
        {"q_len": 5},
    ],
)
def test_plain_decode_mixed_and_longer_batches_are_never_touched(make: Any, changes: dict[str, Any]) -> None:
    cls, plugin = make(miss=Miss.FALLBACK)
    wanted = "prefill" if changes.get("q_len") == 5 else "decode"
    assert cls().build(0, batch(1, 200, **changes)) == wanted
    assert plugin.runtime is None  # not even started


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"block_table_tensor": torch.zeros((1, 8), dtype=torch.int32)}, "contract"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int64)}, "contract"),
        ({"block_table_tensor": torch.zeros((1, 32), dtype=torch.int64)}, "contract"),
    ],
)
def test_metadata_that_break_the_contract_stay_vllms(make: Any, changes: dict[str, Any], why: str) -> None:
    cls, plugin = make()
    assert cls().build(0, batch(1, 200, **changes)) == "decode"
    assert [reason for _, reason in plugin.runtime.counts] == [why]


def test_full_graphs_are_left_alone_and_the_setting_is_named(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cls, _ = make()
    assert cls(enable_cuda_graph=True).build(0, batch(1, 200)) == "decode"
    assert "PIECEWISE" in caplog.text


@pytest.mark.parametrize("layout", [layout for layout in Layout if layout.value[0] != 0] + [Layout.LHBNC])
def test_a_layout_that_no_table_has_is_named_and_left_alone(
    make: Any, caplog: pytest.LogCaptureFixture, layout: Layout
) -> None:
    cls, plugin = make(miss=Miss.FALLBACK)
    builder = cls(kv_cache_layout=layout)
    for size in (1, 2, 1):
        assert builder.build(0, batch(size, 200)) == "decode"
    (line,) = [r.getMessage() for r in caplog.records if "nothing is routed" in r.getMessage()]
    assert f"is laid out as {layout.name};" in line and "LBNHC and LBHNC" in line and "\n" not in line
    assert not plugin.runtime.counts


def test_pages_padded_to_another_layers_size_are_named_and_left_alone(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cls, _ = make(miss=Miss.FALLBACK)
    padded = SimpleNamespace(page_size_bytes=PAGE_BYTES + 512)
    assert cls(kv_cache_spec=padded).build(0, batch(1, 200)) == "decode"
    assert "LBNHC with 8704 bytes a page, of which K and V take 8192" in caplog.text


def test_another_order_of_the_packed_rows_is_another_kind(make: Any) -> None:
    """The table's cells are packed-nhd, which vLLM calls LBNHC."""
    cls, plugin = make()
    assert cls(kv_cache_layout=Layout.LBHNC).build(0, batch(1, 200)) == "decode"
    assert [reason for _, reason in plugin.runtime.counts] == ["shape_not_in_table"]


def test_a_fallback_that_vllm_would_not_run_is_not_taken_for_it(make: Any) -> None:
    """On 9.0 FlashInfer picks fa3 for these heads, and a proof of fa2 says nothing of it."""
    cls, plugin = make(fallback="fa2")
    assert cls().build(0, batch(1, 200)) == "decode"
    assert [reason for _, reason in plugin.runtime.counts] == ["not_deployable_here"]


@pytest.mark.parametrize(
    ("size", "left"), [(None, {3: "decode", 5: "decode"}), (3, {3: "decode", 5: "prefill"})]
)
def test_a_fallback_that_is_withdrawn_takes_no_miss_from_the_reload_on(
    make: Any, tmp_path: Path, size: int | None, left: dict[int, str]
) -> None:
    cls, plugin = make(miss=Miss.FALLBACK)
    builder, path = cls(), tmp_path / "h200.vllm.yaml"
    assert {each: builder.build(0, batch(each)) for each in left} == dict.fromkeys(left, "prefill")
    table = load_table(path)
    gone = Quarantine("fa3", "it faulted", "2026-01-01T00:00:00Z", batch_size=size)
    write_table(withdraw(table, [gone]), path)
    assert plugin.runtime.router.poll(0)
    assert {each: builder.build(0, batch(each)) for each in left} == left


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("capability", "changes", "kv", "wanted"),
    [
        ("9.0", {}, "bf16", "fa3"),
        ("9.0", {"head_dim": 512}, "bf16", "fa2"),
        ("9.0", {"has_sinks": True}, "bf16", None),
        ("9.0", {"q_data_type_prefill": E4M3}, "e4m3", "fa3"),
        ("9.0", {"q_data_type_prefill": E4M3, "head_dim": 96}, "e4m3", None),
        ("9.0", {}, "e4m3", "fa2"),
        ("12.0", {}, "bf16", "fa2"),
        ("10.0", {}, "bf16", "trtllm-gen-context"),
        ("10.3", {"has_sinks": True}, "bf16", "trtllm-gen-context"),
        ("10.0", {"q_data_type_prefill": E4M3}, "e4m3", "trtllm-gen-context"),
        ("10.0", {}, "e4m3", None),
    ],
)
def test_what_the_prefill_path_runs(
    capability: str, changes: dict[str, Any], kv: str, wanted: str | None
) -> None:
    assert vllm.context_kernel(Builder(**changes), kv, capability) == wanted


def test_adaptive_verification_makes_the_decode_call_a_ragged_one() -> None:
    gen = enum.Enum("gen", "TRTLLM_GEN").TRTLLM_GEN  # type: ignore[attr-defined]
    built = Builder(flashinfer_trtllm_api_decode_kernel=gen)
    assert vllm.decode_kernel(built) == "trtllm-gen-decode"
    built.use_trtllm_gen_varlen_decode = True
    assert vllm.decode_kernel(built) == "trtllm-gen-decode-ragged"
    assert vllm.decode_kernel(Builder()) == "xqa-decode"
    assert vllm.decode_kernel(Builder(flashinfer_trtllm_api_decode_kernel=None)) == "fa2-decode"


@pytest.mark.parametrize("changes", [{"use_dcp": True}, {"is_kvcache_nvfp4": True}])
def test_what_the_prefill_path_cannot_do(make: Any, changes: dict[str, Any]) -> None:
    assert make()[0](**changes).build(0, batch(1, 200)) == "decode"


def test_observe(make: Any) -> None:
    cls, plugin = make(Mode.OBSERVE)
    assert cls().build(0, batch(1, 200)) == "decode"
    assert plugin.runtime.counts == {("fa3", "not_faster"): 1}


def test_a_prefill_path_that_fails_is_left_for_good(make: Any) -> None:
    cls, plugin = make()
    builder = cls(fail_as_prefill=ValueError("window left is not the same for all layers"))
    assert builder.build(0, batch(1, 200)) == "decode"
    builder.fail_as_prefill = None
    assert builder.build(0, batch(1, 200)) == "decode"
    assert builder.reorder_batch_threshold == 4
    assert plugin.runtime.counts == {("fa3", "not_faster"): 1, ("xqa-decode", "context_path_failed"): 1}


def test_no_prefill_path_is_replaced_by_a_quarantined_kernel(make: Any, tmp_path: Path) -> None:
    cls, plugin = make()
    builder = cls(fail_as_prefill=ValueError("window left is not the same for all layers"))
    assert builder.build(0, batch(1, 200)) == "decode"  # slower: the prefill path is left for good
    path = tmp_path / "h200.vllm.yaml"
    gone = Quarantine("xqa-decode", "it faulted", "2026-01-01T00:00:00Z")
    write_table(withdraw(load_table(path), [gone]), path)
    assert plugin.runtime.router.poll(0)
    with pytest.raises(RefusedCallError, match=r"xqa-decode is refused here.*fa3 in its place failed"):
        builder.build(0, batch(1, 200))
    assert builder.reorder_batch_threshold == 4
    builder.fail_as_prefill = None
    assert builder.build(0, batch(1, 200)) == "prefill"


def test_register_hooks_once_and_an_unknown_release_is_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType(vllm.MODULE)
    module.FlashInferMetadataBuilder = type("FlashInferMetadataBuilder", (), {"build": Builder.build})
    for name in [".".join(vllm.MODULE.split(".")[:at]) for at in range(1, 5)]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, vllm.MODULE, module)
    settings = Settings(tmp_path, Mode.ROUTE)
    assert vllm.register(settings) is not None
    assert vllm.register(settings) is None
    assert "cannot be read" in str(vllm.unfamiliar(module))


def test_without_vllm_or_a_table_nothing_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert vllm.register(Settings(None, Mode.OFF)) is None
    assert caplog.text == ""
    assert vllm.register(Settings(tmp_path, Mode.ROUTE)) is None
    assert "vllm: off: ModuleNotFoundError" in caplog.text
