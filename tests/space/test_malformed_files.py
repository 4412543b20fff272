"""A malformed file gives one line: the file, the line, the key and what is allowed there."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.space import SpaceError, load_engine, load_file, load_model, load_profile, open_space
from autotune.space.library import folder

GOOD = """\
schema: "autotune/search-space/1"
gpu: "mine"
device:
  kind: "cuda"
  names: ["NVIDIA H200"]
  compute_capability: "9.0"
engines: ["generic"]
models:
- {model: "llama-3.1-70b", attn_tp: [1, 8]}
dtypes: ["bf16"]
q_len: [1, 4]
batch_size: [1, 2, 8]
eager: [[2, 8]]
kv_len: [1024, 4096]
max_context: 4096
objectives: ["graph"]
"""


def message(path: Path) -> str:
    with pytest.raises(SpaceError) as caught:
        load_file(path)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.exit_code == 2
    return text


def test_the_good_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_file(path).gpu == "mine"


ENGINES = "generic, sglang, vllm"
DTYPES = "fp32, bf16, fp8, nvfp4"
KEYS = (
    "schema, gpu, device, engines, models, dtypes, q_len, batch_size, eager, kv_len, max_context, objectives"
)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "q_len: [1, 4]",
            "qlen: [1, 4]",
            f"line 11: qlen: unknown key, did you mean 'q_len'?; allowed: {KEYS}",
        ),
        ("q_len: [1, 4]\n", "", "line 1: q_len: missing; it must be an ascending list of positive integers"),
        (
            "q_len: [1, 4]",
            "q_len: 4",
            "line 11: q_len: must be an ascending list of positive integers, not 4",
        ),
        (
            "q_len: [1, 4]",
            "q_len: []",
            "line 11: q_len: must be an ascending list of positive integers, not []",
        ),
        ("q_len: [1, 4]", "q_len: [0]", "line 11: q_len[0]: must be a positive integer, not 0"),
        ("q_len: [1, 4]", "q_len: [1, four]", "line 11: q_len[1]: must be a positive integer, not 'four'"),
        ("q_len: [1, 4]", "q_len: [true]", "line 11: q_len[0]: must be a positive integer, not True"),
        ("q_len: [1, 4]", "q_len: [4, 1]", "line 11: q_len[1]: must ascend, and 1 follows 4"),
        ("q_len: [1, 4]", "q_len: [1, 1]", "line 11: q_len[1]: 1 is there twice"),
        (
            "q_len: [1, 4]",
            "q_len: [1, 9000]",
            "line 11: q_len: 9000 is longer than every KV row; the longest is 4096",
        ),
        (
            "q_len: [1, 4]",
            "q_len: [1, 4]\nq_len: [1]",
            "line 12: q_len: is there twice, first in line 11",
        ),
        (
            '"autotune/search-space/1"',
            '"autotune/search-space/2"',
            "line 1: schema: must be \"autotune/search-space/1\", not 'autotune/search-space/2'",
        ),
        (
            'dtypes: ["bf16"]',
            'dtypes: ["bf61"]',
            f"line 10: dtypes[0]: must be one of {DTYPES}, not 'bf61', did you mean 'bf16'?",
        ),
        (
            'dtypes: ["bf16"]',
            'dtypes: ["bf16", "bf16"]',
            "line 10: dtypes[1]: 'bf16' is there twice",
        ),
        (
            'dtypes: ["bf16"]',
            "dtypes: bf16",
            f"line 10: dtypes: must be a list of {DTYPES}, not 'bf16'",
        ),
        (
            'engines: ["generic"]',
            'engines: ["sglan"]',
            f"line 7: engines[0]: must be one of {ENGINES}, not 'sglan', did you mean 'sglang'?",
        ),
        (
            'compute_capability: "9.0"',
            "compute_capability: 9.0",
            'line 6: device.compute_capability: must be a string such as "9.0", not 9.0; quote it',
        ),
        (
            'compute_capability: "9.0"',
            'compute_capability: "nine"',
            "line 6: device.compute_capability: must be major.minor, such as \"9.0\", not 'nine'",
        ),
        (
            'compute_capability: "9.0"',
            'compute_capabilty: "9.0"',
            "line 6: device.compute_capabilty: unknown key, did you mean 'compute_capability'?; "
            "allowed: kind, names, compute_capability, sm_count, memory_gib",
        ),
        ('kind: "cuda"', 'kind: "rocm"', "line 4: device.kind: must be one of cpu, cuda, not 'rocm'"),
        (
            "attn_tp: [1, 8]",
            "attn_tp: [3]",
            "line 9: models[0].attn_tp[0]: llama-3.1-70b: attn_tp 3 does not divide its 64 attention heads",
        ),
        ("attn_tp: [1, 8]", "tp: [1]", "line 9: models[0].tp: unknown key; allowed: model, attn_tp"),
        (
            ", attn_tp: [1, 8]",
            "",
            "line 9: models[0].attn_tp: missing; it must be an ascending list of positive integers",
        ),
        (
            '- {model: "llama-3.1-70b", attn_tp: [1, 8]}',
            '- {model: "llama-3.1-70b", attn_tp: [1]}\n- {model: "llama-3.1-70b", attn_tp: [8]}',
            "line 10: models[1].model: 'llama-3.1-70b' is there twice; list its degrees in one attn_tp",
        ),
        (
            '- {model: "llama-3.1-70b", attn_tp: [1, 8]}',
            "- llama-3.1-70b",
            "line 8: models[0]: must be a mapping, not 'llama-3.1-70b'",
        ),
        ("eager: [[2, 8]]", "eager: [[2, 4]]", "line 13: eager[0]: 4 is not in batch_size [1, 2, 8]"),
        ("eager: [[2, 8]]", "eager: [[8, 2]]", "line 13: eager[0]: must have 1 <= low <= high, not [8, 2]"),
        ("eager: [[2, 8]]", "eager: [2, 8]", "line 13: eager[0]: must be two integers [low, high], not 2"),
        (
            "eager: [[2, 8]]",
            "eager: [[1, 8], [2, 8]]",
            "line 13: eager[1]: [2, 8] overlaps [1, 8]",
        ),
        (
            "eager: [[2, 8]]",
            "eager: [[2, 2], [2, 2]]",
            "line 13: eager[1]: [2, 2] overlaps [2, 2]",
        ),
        (
            "batch_size: [1, 2, 8]\n",
            "",
            "line 12: eager: needs batch_size in this file: both ends of an interval are measured there",
        ),
        (
            "max_context: 4096",
            "max_context: 512",
            "line 14: kv_len: every row is longer than max_context 512",
        ),
        ("max_context: 4096", "max_context: 4k", "line 15: max_context: must be an integer >= 1, not '4k'"),
        (
            'objectives: ["graph"]',
            'objectives: ["latency"]',
            "line 16: objectives[0]: must be one of graph, step, not 'latency'",
        ),
        (
            "  names:",
            "\tnames:",
            "line 5: not YAML: found character '\\t' that cannot start any token; "
            "indent with spaces, not tabs",
        ),
        (
            "kv_len: [1024, 4096]",
            "kv_len: [1024, 4096",
            "line 15: not YAML: expected ',' or ']', but got ':'",
        ),
        ('gpu: "mine"', "5: 6", "line 2: a key must be a string, not '5'"),
        ('gpu: "mine"', "gpu: 200", "line 2: gpu: must be a string, not 200; quote it"),
        (
            'device:\n  kind: "cuda"\n  names: ["NVIDIA H200"]\n  compute_capability: "9.0"\n',
            "",
            "line 1: device: missing; it may be left out where gpu is one of "
            "b200, b300, cpu, gb200, gb300, h100, h200",
        ),
        ("device:\n", "device: &a\n  self: *a\n", "line 3: nested more than 16 deep"),
    ],
)
def test_one_fault(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert GOOD.count(old) >= 1
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    assert message(path) == f"{path} {expected}"


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace("llama-3.1-70b", "llama-3.1-7b"))
    text = message(path)
    assert text.startswith(
        f"{path} line 9: models[0].model: unknown model 'llama-3.1-7b', did you mean 'llama-3.1-"
    )
    assert "; known: glm-4.5, gpt-oss-120b, " in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "must be a mapping of keys to values, not None"),
        (b"- 1\n", "must be a mapping of keys to values, not [1]"),
        (b"\xff\xfe", "not UTF-8 text (byte 0)"),
        (b"a: 1\n---\nb: 2\n", "line 2: not YAML: but found another document"),
    ],
)
def test_not_a_mapping(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    text = message(path)
    assert text.removeprefix(str(path)).lstrip(": ") == expected


@pytest.mark.parametrize("content", [b"\x00", b"a: !!python/object:os.system x\n", b"a: 2024-13-45\n"])
def test_what_the_parser_refuses_is_one_line_too(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert message(path).startswith(str(path))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert message(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: No such file or directory"
    assert message(tmp_path) == f"{tmp_path}: Is a directory"


def test_gpu_and_file_that_contradict_each_other(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    with pytest.raises(SpaceError) as caught:
        open_space("h200", path)
    assert str(caught.value) == f"{path}: gpu: is 'mine', but --gpu says 'h200'"
    assert open_space("mine", path).gpu == open_space(None, path).gpu == "mine"
    with pytest.raises(SpaceError, match="--gpu or --space is needed; --gpu takes b200, "):
        open_space()


def test_a_file_may_lean_on_a_shipped_profile(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    lines = GOOD.replace('gpu: "mine"', 'gpu: "h200"').splitlines()
    path.write_text("\n".join(lines[:2] + lines[6:]) + "\n")
    assert load_file(path).device == load_profile("h200").device


def test_a_model_beside_the_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    own = (folder() / "models" / "llama-3.1-70b.yaml").read_text().replace("layers: 80", "layers: 3")
    (tmp_path / "models" / "llama-3.1-70b.yaml").write_text(own)
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load_file(path).models[0][0].attention[0].layers == 3


MODEL = """\
schema: "autotune/model/1"
name: "m"
num_attention_heads: 8
num_kv_heads: 2
head_dim: 64
attention:
- {kind: "full", layers: 2}
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "num_kv_heads: 2",
            "num_kv_heads: 3",
            "line 4: num_kv_heads: must divide num_attention_heads 8, not 3",
        ),
        ('name: "m"', 'name: "n"', 'line 2: name: must be the file\'s name "m", not "n"'),
        (
            'kind: "full"',
            'kind: "linear"',
            "line 7: attention[0].kind: must be one of full, sliding, not 'linear'",
        ),
        (
            "layers: 2",
            "layers: 2, window: 8",
            "line 7: attention[0].window: only a sliding kind has a window",
        ),
        (
            'kind: "full"',
            'kind: "sliding"',
            "line 7: attention[0].window: missing; it must be an integer >= 1",
        ),
        (
            "layers: 2}",
            'layers: 2}\n- {kind: "full", layers: 1}',
            "line 8: attention[1].kind: 'full' is there twice; add the layers up",
        ),
        ("head_dim: 64", "head_dim: 64\nsinks: 1", "line 6: sinks: must be true or false, not 1"),
        ("head_dim: 64", "head_dim: 64\nsoft_cap: .inf", "line 6: soft_cap: must be a number >= 0, not inf"),
    ],
)
def test_a_model_with_one_fault(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(MODEL)
    load_model(path)
    path.write_text(MODEL.replace(old, new, 1))
    with pytest.raises(SpaceError) as caught:
        load_model(path)
    assert str(caught.value) == f"{path} {expected}"


def test_engine_faults(tmp_path: Path) -> None:
    good = (folder() / "engines" / "sglang.yaml").read_text()
    path = tmp_path / "sglang.yaml"
    path.write_text(good)
    assert load_engine(path).digest == load_engine("sglang").digest
    for old, new, expected in (
        (
            '["uniform_q_len"]',
            '["uniform"]',
            "offers[0]: must be one of host_kv_lens, uniform_q_len, not 'uniform'",
        ),
        ("  sm90:", "  sm9:", "architectures.sm9: unknown key, did you mean 'sm90'?; allowed: cpu, sm90, "),
        (
            'stock: "xqa-decode"',
            'stock: "fa3"',
            "architectures.sm90.stock: must be one of xqa-decode, fmha-v2, ",
        ),
        (
            '["fmha-v2", "fa2"]',
            '["fa2"]',
            "architectures.sm90.fallback: names no deployable route; deployable: ",
        ),
        ('"fused-nhd"', '"paged"', "kv_layout: must be one of fused-nhd, fused-hnd, "),
    ):
        assert good.count(old) == 1
        path.write_text(good.replace(old, new))
        with pytest.raises(SpaceError) as caught:
            load_engine(path)
        assert f": {expected}" in str(caught.value)
        assert str(caught.value).startswith(f"{path} line ")
    with pytest.raises(SpaceError) as caught:
        load_engine("slang")
    assert str(caught.value) == (f"--engine slang: unknown engine, did you mean 'sglang'?; known: {ENGINES}")
    with pytest.raises(SpaceError) as caught:
        load_engine("sglang").stock("cpu")
    assert str(caught.value) == "--engine sglang: has no profile for cpu; it has sm90, sm100, sm103"
