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
from autotune.engines.environment import Miss, Mode, Settings
from autotune.engines.runtime import Runtime
from autotune.engines.vllm import Plugin
from autotune.router import Router
from autotune.table.build import build_table
from autotune.table.dump import dump_table
from autotune.table.model import Policy
from tests.table.samples import CUDA_FACTS, GENERATED, decided

FASTER = Decision("xqa-decode", Reason.PROVEN_FASTER, "", 1.3, 1.4, 1.0)
SLOWER = Decision(None, Reason.NOT_FASTER, vs_stock=1.1)


class Kernel(enum.Enum):
    XQA = "xqa"


class Builder:
    """What ``FlashInferMetadataBuilder`` has that the hook reads; ``build`` says how it split the batch."""

    def __init__(self, **changes: Any) -> None:
        self.reorder_batch_threshold = 4
        self.num_qo_heads, self.num_kv_heads, self.head_dim, self.page_size = 8, 1, 128, 16
        self.window_left, self.has_sinks, self.logits_soft_cap = -1, False, None
        self.use_dcp = self.is_kvcache_nvfp4 = self.enable_cuda_graph = False
        self.kv_cache_layout: Any = "NHD"
        self.kv_cache_dtype = torch.bfloat16
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
    """``make(mode=..., miss=...)``: a hooked class of builders and its plugin."""
    cells = [
        decided(
            size,
            row,
            decision,
            shape=Shape(8, 1, 128, 16, kv_layout="interleaved-nhd"),
            dtypes=DTypes("bf16", "bf16", "bf16"),
            max_context=512,
            fallback="fa2",
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
        families={"xqa-decode": "decode", "fa2": "context"},
    )
    path = tmp_path / "h200.vllm.yaml"
    path.write_bytes(dump_table(made))

    def install(mode: Mode = Mode.ROUTE, miss: Miss = Miss.STOCK) -> tuple[type, Plugin]:
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


def test_a_layout_that_no_table_has_is_named_and_left_alone(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cls, _ = make(miss=Miss.FALLBACK)
    packed = enum.Enum("packed", "LBNHC").LBNHC  # type: ignore[attr-defined]
    assert cls(kv_cache_layout=packed).build(0, batch(1, 200)) == "decode"
    assert "LBNHC" in caplog.text


@pytest.mark.parametrize("changes", [{"use_dcp": True}, {"is_kvcache_nvfp4": True}])
def test_what_the_prefill_path_cannot_do(make: Any, changes: dict[str, Any]) -> None:
    assert make()[0](**changes).build(0, batch(1, 200)) == "decode"


def test_observe(make: Any) -> None:
    cls, plugin = make(Mode.OBSERVE)
    assert cls().build(0, batch(1, 200)) == "decode"
    assert plugin.runtime.counts == {("fa2", "not_faster"): 1}


def test_a_prefill_path_that_fails_is_left_for_good(make: Any) -> None:
    cls, _ = make()
    builder = cls(fail_as_prefill=ValueError("window left is not the same for all layers"))
    assert builder.build(0, batch(1, 200)) == "decode"
    builder.fail_as_prefill = None
    assert builder.build(0, batch(1, 200)) == "decode"
    assert builder.reorder_batch_threshold == 4


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
