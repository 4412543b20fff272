"""Every shipped file loads and expands; the grids that users are promised have the promised size."""

from __future__ import annotations

import pytest
import yaml

from autotune.routes.base import Need
from autotune.space import (
    UnknownProfile,
    engine_names,
    expand,
    load_engine,
    load_model,
    load_profile,
    model_names,
    open_space,
    profiles,
)
from autotune.space.engine import NEEDS
from autotune.space.library import folder


def test_profiles() -> None:
    assert profiles() == ["b200", "b300", "cpu", "gb200", "gb300", "h100", "h200"]
    assert engine_names() == ["generic", "sglang", "vllm"]


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(UnknownProfile) as caught:
        load_profile("h20")
    assert str(caught.value) == (
        "--gpu h20: unknown profile, did you mean 'h200'?; known: b200, b300, cpu, gb200, gb300, h100, h200"
    )
    assert caught.value.exit_code == 2
    with pytest.raises(UnknownProfile, match="--gpu nonsense: unknown profile; known: b200"):
        open_space("nonsense")
    with pytest.raises(UnknownProfile):  # no way out of the folder
        open_space("../search_spaces/h200")


@pytest.mark.parametrize("gpu", profiles())
def test_every_profile_expands_under_each_of_its_engines(gpu: str) -> None:
    space = load_profile(gpu)
    assert space.engines[0] == "generic"
    for name in space.engines:
        engine = load_engine(name)
        grid = expand(space, engine)
        ids = [item.cell.id for item in grid.cells]
        assert ids
        assert len(set(ids)) == len(ids)
        assert len({column.id for column in grid.columns}) == len(grid.columns)
        assert engine.stock(grid.architecture) in engine.deployable(grid.architecture)
        assert expand(load_profile(gpu), load_engine(name)).digest == grid.digest


@pytest.mark.parametrize("engine", ["generic", "sglang"])
@pytest.mark.parametrize(
    ("gpu", "columns", "cells"),
    [
        ("h100", 432, 2160),
        ("h200", 432, 2160),
        ("b200", 648, 3240),
        ("gb300", 648, 3240),
        ("b300", 648, 3240),
    ],
)
def test_gpu_grid_sizes(gpu: str, engine: str, columns: int, cells: int) -> None:
    grid = expand(load_profile(gpu), load_engine(engine))
    assert (len(grid.columns), len(grid.cells)) == (columns, cells)


def test_the_h200_grid() -> None:
    grid = expand(load_profile("h200"), load_engine("sglang"))
    heads = {
        label: (entry.shape.num_qo_heads, entry.shape.num_kv_heads, entry.shape.head_dim)
        for entry in grid.entries
        for label in entry.models
    }
    assert heads == {
        "qwen3.5-397b-a17b @ attn_tp 1": (32, 2, 256),
        "qwen3.5-397b-a17b @ attn_tp 4": (8, 1, 256),
        "llama-3.1-70b @ attn_tp 8": (8, 1, 128),
    }
    assert {(entry.dtypes.q, entry.dtypes.kv) for entry in grid.entries} == {
        ("bf16", "bf16"),
        ("bf16", "e4m3"),
    }
    assert {column.batch_size for column in grid.columns} == {2**i for i in range(9)}
    assert {column.q_len for column in grid.columns} == set(range(1, 9))
    assert {item.cell.kv_high for item in grid.cells} == {1024, 4096, 16384, 65536, 131072}
    assert {(column.shape.page_size, column.shape.kv_layout) for column in grid.columns} == {
        (64, "fused-nhd")
    }
    assert grid.dropped_kv == ()
    # one measurement serves both tables
    assert grid.digest == expand(load_profile("h200"), load_engine("generic")).digest


def test_b200_adds_nvfp4() -> None:
    grid = expand(load_profile("b200"), load_engine("generic"))
    assert {entry.profile for entry in grid.entries} == {"bf16", "fp8", "nvfp4"}


def test_the_cpu_grid() -> None:
    grid = expand(load_profile("cpu"), load_engine("generic"))
    assert (len(grid.columns), len(grid.cells)) == (12, 24)
    assert {entry.models for entry in grid.entries} == {
        ("llama-3.1-70b @ attn_tp 8", "qwen3-235b-a22b @ attn_tp 8")
    }
    assert grid.entries[0].layers == {"llama-3.1-70b @ attn_tp 8": 80, "qwen3-235b-a22b @ attn_tp 8": 94}
    assert {column.shape.page_size for column in grid.columns} == {16}
    interiors = [column for column in grid.columns if column.interval]
    assert {column.interval for column in interiors} == {(1, 8)}
    assert {column.batch_size for column in interiors} < set(range(2, 8))
    engine = load_engine("generic")
    assert engine.fallback("cpu") == ("torch-sdpa",)
    assert engine.stock("cpu") == "torch-sdpa"
    assert engine.deployable("cpu") == ("torch-sdpa", "torch-splitkv")


@pytest.mark.parametrize("name", model_names())
def test_every_model_loads(name: str) -> None:
    model = load_model(folder() / "models" / f"{name}.yaml")
    assert model.name == name
    assert model.num_attention_heads % model.num_kv_heads == 0


def test_models_that_must_be_there() -> None:
    assert set(model_names()) >= {
        "qwen3.5-397b-a17b",
        "qwen3-235b-a22b",
        "llama-3.1-8b",
        "llama-3.1-70b",
        "gpt-oss-120b",
        "glm-4.5",
        "minimax-m2",
    }


def test_engine_routes_of_hopper_and_blackwell() -> None:
    sglang, vllm, generic = (load_engine(name) for name in ("sglang", "vllm", "generic"))
    assert sglang.fallback("sm90") == ("fmha-v2", "fa2")
    assert vllm.fallback("sm90") == ("fa3", "fa2")
    assert generic.fallback("sm90") == ("fa2",)
    for engine in (sglang, vllm, generic):
        for arch in ("sm100", "sm103"):
            assert engine.fallback(arch)[0] == "trtllm-gen-context"
    assert sglang.stock("sm90") == "xqa-decode"
    assert sglang.stock("sm100") == "trtllm-gen-decode"
    assert "host_kv_lens" not in sglang.offers
    assert vllm.on("sm100").kv_layout == "packed-hnd"
    assert vllm.on("sm90").kv_layout == "packed-nhd"


def test_third_party_routes_compete_only_where_the_engine_can_call_them() -> None:
    generic, sglang = load_engine("generic"), load_engine("sglang")
    assert generic.can_deploy("cpu", "torch-splitkv", built_in=True)
    assert generic.can_deploy("cpu", "someones-own", built_in=False)
    assert not generic.can_deploy("cpu", "someones-own", built_in=True)
    assert not sglang.can_deploy("sm90", "someones-own", built_in=False)
    assert not sglang.can_deploy("sm90", "fa2", built_in=True)


def test_needs_are_those_of_the_routes() -> None:
    assert set(NEEDS) == {need.value for need in Need}


def test_every_string_in_the_shipped_files_is_quoted() -> None:
    for path in sorted(folder().rglob("*.yaml")):
        root = yaml.compose(path.read_text())
        assert root is not None

        def walk(node: yaml.Node, where: str) -> None:
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    walk(value, f"{where}.{key.value}")
            elif isinstance(node, yaml.SequenceNode):
                for item in node.value:
                    walk(item, where)
            elif isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
                assert node.style == '"', where

        walk(root, path.name)
