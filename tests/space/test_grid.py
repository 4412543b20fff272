"""Expansion and filters: each shape once, rows without gaps, values outside the space refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.space import Grid, SpaceError, expand, load_engine, load_file, load_profile
from autotune.space.grid import interior, kv_rows
from autotune.space.library import folder


@pytest.fixture
def cpu() -> Grid:
    return expand(load_profile("cpu"), load_engine("generic"))


def test_rows_follow_each_other_from_q_len(cpu: Grid) -> None:
    for entry in cpu.entries:
        assert entry.rows[0][0] == entry.q_len
        assert all(low == high + 1 for (_, high), (low, _) in zip(entry.rows, entry.rows[1:], strict=False))
    assert [(item.cell.kv_low, item.cell.kv_high) for item in cpu.cells[:2]] == [(1, 256), (257, 2048)]


def test_rows_past_the_context_are_dropped_and_named() -> None:
    grid = expand(replace(load_profile("h200"), max_context=16384), load_engine("sglang"))
    assert grid.dropped_kv == (65536, 131072)
    assert {item.cell.kv_high for item in grid.cells} == {1024, 4096, 16384}
    with pytest.raises(SpaceError, match="no row fits below max_context 512"):
        expand(replace(load_profile("h200"), max_context=512), load_engine("sglang"))


def test_engine_defaults_where_the_space_is_silent() -> None:
    space = replace(load_profile("h200"), batch_size=None, max_context=None)
    engine = replace(load_engine("sglang"), capture_sizes=(3, 5), max_context=65536)
    grid = expand(space, engine)
    assert {column.batch_size for column in grid.columns} == {3, 5}
    assert {column.max_context for column in grid.columns} == {65536}
    assert grid.dropped_kv == (131072,)


def test_an_engine_that_is_not_on_the_device() -> None:
    with pytest.raises(SpaceError, match="--engine vllm: has no profile for cpu"):
        expand(load_profile("cpu"), load_engine("vllm"))


def test_two_layer_kinds_are_two_entries(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    text = (folder() / "cpu.yaml").read_text()
    path.write_text(
        text.replace('{model: "llama-3.1-70b", attn_tp: [8]}', '{model: "gpt-oss-120b", attn_tp: [8]}')
    )
    grid = expand(load_file(path), load_engine("generic"))
    kinds = {(label, entry.shape.window_left) for entry in grid.entries for label in entry.models}
    assert kinds == {
        ("gpt-oss-120b @ attn_tp 8 (full)", -1),
        ("gpt-oss-120b @ attn_tp 8 (sliding 128)", 127),
        ("qwen3-235b-a22b @ attn_tp 8", -1),
    }


def test_interiors() -> None:
    assert interior(1, 1) is None
    assert interior(1, 2) is None
    assert interior(1, 3) == 2


@given(low=st.integers(1, 1000), width=st.integers(2, 1000))
def test_an_interior_lies_inside_and_never_moves(low: int, width: int) -> None:
    size = interior(low, low + width)
    assert size is not None
    assert low < size < low + width
    assert interior(low, low + width) == size


@given(
    ends=st.lists(st.integers(1, 5000), min_size=1, max_size=8, unique=True).map(sorted),
    q_len=st.integers(1, 64),
    max_context=st.integers(64, 5000),
)
def test_rows_cover_every_length_once(ends: list[int], q_len: int, max_context: int) -> None:
    covered = [length for low, high in kv_rows(ends, q_len, max_context) for length in range(low, high + 1)]
    fitting = [end for end in ends if q_len <= end <= max_context]
    assert covered == list(range(q_len, (max(fitting) if fitting else q_len - 1) + 1))


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    text = (folder() / "cpu.yaml").read_text()
    path = tmp_path / "cpu.yaml"
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    top, rest = lines[:2], lines[2:]
    rest = [line.replace("q_len: [1, 4]", "q_len:\n- 1\n- 4") for line in rest]
    path.write_text("\n".join([*top, *rest]) + "\n# a comment\n")
    assert load_file(path).digest == load_profile("cpu").digest
    path.write_text(text.replace("q_len: [1, 4]", "q_len: [1, 5]"))
    assert load_file(path).digest != load_profile("cpu").digest
    digests = [load_profile(name).digest for name in ("h100", "h200", "b200", "gb200", "b300", "gb300")]
    assert len(set(digests)) == len(digests)


def test_filters(cpu: Grid) -> None:
    whole = {item.cell.id for item in cpu.cells}
    part = cpu.restrict(models=["llama-3.1-70b"], dtypes=["bf16"], q_len=[4], batch=[8], kv=[2048])
    assert [(item.cell.kv_low, item.cell.kv_high) for item in part.cells] == [(257, 2048)]
    assert {item.models for item in part.cells} == {("llama-3.1-70b @ attn_tp 8",)}
    assert {item.cell.id for item in part.cells} < whole  # a filtered cell is the same cell
    assert cpu.restrict().digest == cpu.digest
    assert len(cpu.restrict(trials=5).cells) == 5
    assert cpu.restrict(trials=5).cells == cpu.cells[:5]
    assert len(cpu.restrict(trials=5).restrict(trials=9).cells) == 5
    assert len(cpu.restrict(trials=5).columns) == 3


def test_an_interval_stays_where_both_its_ends_do(cpu: Grid) -> None:
    assert not [column for column in cpu.restrict(batch=[8]).columns if column.interval]
    assert cpu.restrict(batch=[1, 8]).digest == cpu.digest
    assert cpu.restrict(batch=[8]).entries[0].intervals == ()


def test_attn_tp_filter() -> None:
    grid = expand(load_profile("h200"), load_engine("sglang"))
    assert len(grid.restrict(models=["qwen3.5-397b-a17b"], attn_tp=[4]).columns) == 144
    with pytest.raises(SpaceError, match="the filters leave no cell"):
        grid.restrict(models=["llama-3.1-70b"], attn_tp=[4])


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"batch": [3]}, "--batch 3: not in the space, which has 1, 8"),
        ({"q_len": [1, 2]}, "--q-len 2: not in the space, which has 1, 4"),
        ({"kv": [512]}, "--kv 512: not in the space, which has 256, 2048"),
        ({"dtypes": ["fp8"]}, "--dtype fp8: not in the space, which has fp32, bf16"),
        ({"attn_tp": [4]}, "--attn-tp 4: not in the space, which has 8"),
        (
            {"models": ["glm-4.5"]},
            "--models glm-4.5: not in the space, which has llama-3.1-70b, qwen3-235b-a22b",
        ),
        ({"batch": []}, "--batch: names nothing; the space has 1, 8"),
        ({"trials": 0}, "--trials 0: must be an integer >= 1"),
    ],
)
def test_filters_outside_the_space(cpu: Grid, filters: dict[str, object], expected: str) -> None:
    with pytest.raises(SpaceError) as caught:
        cpu.restrict(**filters)  # type: ignore[arg-type]
    assert str(caught.value) == expected
