"""The SGLang plugin on a stand-in of SGLang's backend; on the real one if ``AUTOTUNE_SGLANG_SITE`` has it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.engines import sglang
from autotune.engines.choice import RefusedCallError
from autotune.engines.environment import Miss, Mode, Settings
from autotune.engines.sglang import Plugin
from tests.engines import sglang_parts as parts
from tests.engines import standin, tables
from tests.engines.standin import Library
from tests.table.samples import CUDA_FACTS

SITE = os.environ.get("AUTOTUNE_SGLANG_SITE", "")
NEEDS_SITE = pytest.mark.skipif(not SITE, reason="AUTOTUNE_SGLANG_SITE names no unpacked SGLang")


@pytest.fixture
def library() -> Iterator[Library]:
    with standin.installed() as found:
        yield found


@pytest.fixture(params=["stand-in", pytest.param("real", marks=NEEDS_SITE)])
def module(request: pytest.FixtureRequest, library: Library) -> Iterator[Any]:
    with parts.stand_in() if request.param == "stand-in" else parts.real(Path(SITE)) as found:
        yield found


class Engine:
    """A backend of the hooked class, and the steps of a server."""

    def __init__(self, module: Any, library: Library, *, fused: bool = True) -> None:
        self.mode = module.ForwardMode
        self.library = library
        self.backend = parts.backend_of(module, standin.WORKSPACE, standin.causal_mask(17, 4), fused=fused)
        self.query = torch.randn((16 * 4, 8 * 128), generator=torch.Generator().manual_seed(1)).bfloat16()

    def batch(self, size: int, mode: str, lens: tuple[int, ...] | None = None) -> parts.Batch:
        known = torch.tensor(lens or tuple(range(20, 20 + size)), dtype=torch.int64)
        return parts.Batch(getattr(self.mode, mode), known)

    def layers(self, batch: parts.Batch, count: int = 2, **changes: Any) -> tuple[list[str], torch.Tensor]:
        """The kernels that ``count`` layers called, and the last result."""
        self.library.calls.clear()
        query = self.query[: batch.batch_size * 4]
        mode = batch.forward_mode
        for layer_id in range(count):
            layer = parts.Layer(layer_id, **changes)
            out = self.backend.forward_extend(query, query, query, layer, batch)
            assert batch.forward_mode is mode
        return self.library.called, out

    def step(self, size: int, mode: str = "TARGET_VERIFY", **changes: Any) -> list[str]:
        """One eager step."""
        batch = self.batch(size, mode)
        self.backend.init_forward_metadata(batch)
        return self.layers(batch, **changes)[0]


@pytest.fixture
def hooked(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``hooked(miss=...)`` registers and applies the hooks; returns the plugin."""
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps(CUDA_FACTS.to_dict()))
    table = tables.write(tmp_path / "h200.sglang.yaml")
    monkeypatch.setattr(sglang, "unfamiliar", lambda: None)

    def register(mode: Mode = Mode.ROUTE, miss: Miss = Miss.STOCK, place: Path = table) -> Plugin:
        from sglang.srt.plugins.hook_registry import HookRegistry

        plugin = sglang.register(Settings(place, mode, miss, facts, tmp_path / "state"))
        assert plugin is not None
        HookRegistry.apply_hooks()
        return plugin

    return register


VERIFIED = [(1, "fmha_v2"), (2, "decode"), (4, "decode"), (8, "fmha_v2"), (16, "decode"), (3, "decode")]


@pytest.mark.parametrize(("size", "called"), VERIFIED)
def test_an_eager_verify_goes_where_the_table_says(
    module: Any, library: Library, hooked: Any, size: int, called: str
) -> None:
    engine = Engine(module, library)
    before = engine.batch(size, "TARGET_VERIFY")
    engine.backend.init_forward_metadata(before)
    _, expected = engine.layers(before)
    hooked()
    batch = engine.batch(size, "TARGET_VERIFY")
    engine.backend.init_forward_metadata(batch)
    names, out = engine.layers(batch)
    assert names == [called, called]
    assert torch.equal(out, expected)


def test_draft_extend_too_and_misses_by_policy(module: Any, library: Library, hooked: Any) -> None:
    engine = Engine(module, library)
    hooked(miss=Miss.FALLBACK)
    assert engine.step(1, "DRAFT_EXTEND_V2") == ["fmha_v2"] * 2
    assert engine.step(16, "DRAFT_EXTEND_V2") == ["fmha_v2"] * 2  # unproven: a miss
    assert engine.step(2, "DRAFT_EXTEND_V2") == ["decode"] * 2


def test_what_is_captured_after_a_warm_up_is_made_in_the_capture(
    module: Any, library: Library, hooked: Any
) -> None:
    """A warm-up's expanded page table, kept in metadata that outlive it, would be frozen into the graph."""
    hooked()
    engine = Engine(module, library)
    batch = engine.batch(1, "TARGET_VERIFY", (1,))
    engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    expanded = []
    for _ in range(2):  # a warm-up, then the capture
        engine.backend.init_forward_metadata_in_graph(batch)
        names, _ = engine.layers(batch)
        assert names == ["fmha_v2", "fmha_v2"]
        first, second = (call["block_tables"] for _, call in library.calls)
        assert first is second  # shared by the layers of one forward
        expanded.append(first)
    assert expanded[0] is not expanded[1]
    # a replay with other lengths: the metadata step writes in place what the graph reads
    replayed = engine.batch(1, "TARGET_VERIFY", (300,))
    engine.backend.init_forward_metadata_out_graph(replayed)
    engine.backend.init_forward_metadata_in_graph(replayed)
    assert engine.backend.forward_metadata.cache_seqlens_int32.tolist() == [304]
    assert engine.layers(replayed)[0] == ["fmha_v2", "fmha_v2"]


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_type": parts.AttentionType.ENCODER_ONLY},
        {"is_cross_attention": True},
        {"sliding_window_size": 128},
        {"logit_cap": 30.0},
    ],
)
def test_layers_that_the_table_does_not_know_are_left_alone(
    module: Any, library: Library, hooked: Any, changes: dict[str, Any]
) -> None:
    hooked()
    engine = Engine(module, library)
    if "attn_type" in changes and hasattr(engine.backend, "_needs_encoder_only_expand"):
        engine.backend.expand_encoder_only_verify = True
    assert engine.step(1, **changes) == ["decode", "decode"]


def test_a_pool_that_the_context_kernel_would_copy_is_left_alone(
    module: Any, library: Library, hooked: Any
) -> None:
    hooked(miss=Miss.STOCK)
    assert Engine(module, library, fused=False).step(1) == ["decode", "decode"]


def test_extends_are_never_touched(module: Any, library: Library, hooked: Any) -> None:
    plugin = hooked(miss=Miss.FALLBACK)
    engine = Engine(module, library)
    engine.step(1)
    assert vars(engine.backend)["_autotune_step"]
    batch = engine.batch(2, "EXTEND")
    batch.extend_prefix_lens_cpu = [16, 17]
    engine.backend.init_forward_metadata(batch)
    assert "_autotune_step" not in vars(engine.backend)
    counted = dict(plugin.runtime.counts)
    engine.layers(batch)
    assert plugin.runtime.counts == counted


def test_observe_calls_what_the_engine_calls(module: Any, library: Library, hooked: Any) -> None:
    plugin = hooked(Mode.OBSERVE)
    assert Engine(module, library).step(1) == ["decode", "decode"]
    assert plugin.runtime.counts == {("fmha-v2", "not_faster"): 2}


def test_broken_metadata_are_refused(module: Any, library: Library, hooked: Any) -> None:
    """The table is narrower than the context: what the reverted change of the engine handed over."""
    plugin = hooked(miss=Miss.FALLBACK)
    engine = Engine(module, library)
    batch = engine.batch(2, "TARGET_VERIFY")
    engine.backend.init_forward_metadata(batch)
    assert engine.layers(batch)[0] == ["decode", "decode"]
    metadata = engine.backend.forward_metadata
    metadata.page_table = metadata.page_table[:, :3].contiguous()
    assert engine.layers(batch)[0] == ["decode", "decode"]
    assert plugin.runtime.counts["xqa-decode", "contract"] == 2


def test_a_context_path_that_fails_is_left_for_good(module: Any, library: Library, hooked: Any) -> None:
    plugin = hooked()
    engine = Engine(module, library)
    library.fail["fmha_v2"] = RuntimeError("no kernel for this head_dim")
    assert engine.step(1) == ["fmha_v2", "decode", "decode"]
    assert engine.step(1) == ["decode", "decode"]
    # from then on what is counted is what ran
    assert plugin.runtime.counts == {("fmha-v2", "not_faster"): 1, ("xqa-decode", "context_path_failed"): 3}


def test_no_context_path_is_replaced_by_an_unsafe_kernel(
    module: Any, library: Library, hooked: Any, tmp_path: Path
) -> None:
    """Nor after it failed in a cell where the engine's own kernel is only faster or slower."""
    hooked()
    engine = Engine(module, library)
    library.fail["fmha_v2"] = RuntimeError("no such kernel was built")
    for left in (False, True):
        with pytest.raises(RefusedCallError, match=r"xqa-decode is refused here.*no such kernel was built"):
            engine.step(8)
        if not left:
            assert engine.step(1) == ["fmha_v2", "decode", "decode"]
    assert engine.step(1) == ["decode", "decode"]
    library.fail.clear()
    assert engine.step(8) == ["fmha_v2", "fmha_v2"]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_is_noted_of_a_capture_is_what_ran_in_the_end(
    module: Any, library: Library, hooked: Any, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr(sglang, "capturing", lambda: True)
    plugin = hooked()
    engine = Engine(module, library)
    real, calls = library.fmha_v2, 0

    def flaky(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 == failing:
            raise RuntimeError("no workspace is left")
        return real(*args, **kwargs)

    monkeypatch.setattr(sys.modules["flashinfer.prefill"], "trtllm_fmha_v2_prefill", flaky)
    batch = engine.batch(1, "TARGET_VERIFY")
    engine.backend.init_forward_metadata(batch)
    engine.layers(batch, 3)
    assert [note.ran for note in plugin.runtime.captures._notes.values()] == ["xqa-decode"]


def test_an_output_of_another_size_is_told_as_such(module: Any, library: Library, hooked: Any) -> None:
    plugin = hooked()
    engine = Engine(module, library)
    batch = engine.batch(8, "TARGET_VERIFY")
    batch._attn_output = torch.zeros(99)
    engine.backend.init_forward_metadata(batch)
    engine.layers(batch)
    assert plugin.runtime.counts == {("xqa-decode", "not_deployable_here"): 2}


def test_a_dead_context_is_raised_and_its_routes_are_suspects(
    module: Any, library: Library, hooked: Any, tmp_path: Path
) -> None:
    hooked()
    engine = Engine(module, library)
    library.fail["fmha_v2"] = standin.IllegalAccessError()
    with pytest.raises(standin.IllegalAccessError):
        engine.step(1)
    (kept,) = (tmp_path / "state").glob("suspects-*.json")
    found = json.loads(kept.read_text())
    assert found["routes"][0][0] == "fmha-v2" and "illegal memory access" in found["death"]


def test_our_own_failures_are_stock(
    module: Any, library: Library, hooked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked()
    engine = Engine(module, library)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Plugin, "_choose", fail)
    assert engine.step(1) == ["decode", "decode"]
    monkeypatch.setattr(Plugin, "_resolve", fail)
    assert engine.step(1) == ["decode", "decode"]


def test_an_unknown_release_is_observed_only(
    module: Any, library: Library, hooked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "unfamiliar", lambda: "reads otherwise")
    plugin = hooked()
    assert Engine(module, library).step(1) == ["decode", "decode"]
    assert plugin.runtime.mode is Mode.OBSERVE


def test_nothing_is_registered_without_a_table() -> None:
    assert sglang.register(Settings(None, Mode.OFF)) is None
    assert sglang.register(Settings(Path("x"), Mode.OFF, problem="AUTOTUNE_MODE says maybe")) is None


@NEEDS_SITE
def test_sglangs_own_loader_finds_applies_and_resolves(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``load_plugins`` of the real wheel: entry point, ``HookRegistry``, the real class, its real source."""
    from importlib.metadata import EntryPoint

    monkeypatch.setenv("AUTOTUNE_TABLE", str(tables.write(tmp_path / "t.yaml")))
    with parts.real(Path(SITE)) as found:
        import sglang.srt.plugins as plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.reset()
        point = EntryPoint("autotune", "autotune.engines.sglang:register", plugins.GENERAL_PLUGINS_GROUP)
        entry = SimpleNamespace(name=point.name, value=point.value, load=point.load, dist=None)
        wanted = plugins.GENERAL_PLUGINS_GROUP
        monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == wanted else [])
        originals = {name: vars(found.TRTLLMHAAttnBackend)[name] for name in _hooked_names()}
        plugins.load_plugins()
        for name, original in originals.items():
            assert vars(found.TRTLLMHAAttnBackend)[name].__wrapped__ is original
        assert HookRegistry._patched == {f"{_target()}.{name}" for name in originals}


def _hooked_names() -> tuple[str, ...]:
    from autotune.engines.sglang import METADATA

    return ("forward_extend", *METADATA)


def _target() -> str:
    from autotune.engines.sglang import TARGET

    return TARGET
