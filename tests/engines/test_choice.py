"""What a call gets: decided, missed, mixed rows; and a folder of tables, and the environment."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from autotune.engines.choice import Chooser, hint, row_ends
from autotune.engines.environment import Miss, Mode, Settings, find_table, read_settings
from autotune.engines.runtime import Runtime, start
from tests.engines import tables
from tests.table.samples import CUDA_FACTS, FACTS


def chooser(tmp_path: Path, miss: Miss, **options: Any) -> Chooser:
    runtime = Runtime(tables.router(tmp_path / "t.yaml"), engine="sglang", miss=miss)
    return runtime.chooser(
        tables.KIND,
        tables.BF16,
        **{
            "max_context": 512,
            "stock": "xqa-decode",
            "fallback": "fmha-v2",
            "deployable": frozenset({"fmha-v2"}),
            **options,
        },
    )


@pytest.mark.parametrize(
    ("call", "stock", "fallback"),
    [
        ((1, 4), ("fmha-v2", "not_faster"), ("fmha-v2", "not_faster")),
        ((2, 4), (None, "proven_faster"), (None, "proven_faster")),
        ((4, 4), (None, "rows_disagree"), ("fmha-v2", "rows_disagree")),
        ((4, 4, 200), ("fmha-v2", "not_faster"), ("fmha-v2", "not_faster")),
        ((4, 4, 300), (None, "proven_faster"), (None, "proven_faster")),
        # one unsafe row is enough where the length is not known
        ((8, 4), ("fmha-v2", "candidate_unsafe"), ("fmha-v2", "candidate_unsafe")),
        ((8, 4, 300), (None, "proven_faster"), (None, "proven_faster")),
        ((16, 4), (None, "unproven"), ("fmha-v2", "unproven")),
        ((3, 4), (None, "batch_size_not_proven"), ("fmha-v2", "batch_size_not_proven")),
        ((2, 5), (None, "q_len_not_in_table"), ("fmha-v2", "q_len_not_in_table")),
        ((2, 4, 513), (None, "kv_len_not_proven"), ("fmha-v2", "kv_len_not_proven")),
    ],
)
def test_by_policy(tmp_path: Path, call: tuple[int, ...], stock: Any, fallback: Any) -> None:
    for miss, expected in ((Miss.STOCK, stock), (Miss.FALLBACK, fallback)):
        choice = chooser(tmp_path, miss).choose(*call)
        assert (choice.route, choice.why) == expected


def test_what_cannot_be_called_here_is_named_not_faked(tmp_path: Path) -> None:
    choice = chooser(tmp_path, Miss.FALLBACK, deployable=frozenset()).choose(1, 4)
    assert (choice.route, choice.why, choice.decided) == (None, "not_deployable_here", False)
    assert "--attention-backend" in hint("fa2")


def test_one_line_says_what_is_decided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autotune.engines")
    made = chooser(tmp_path, Miss.STOCK)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "autotune.engines"]
    assert "3 of 5 captured (batch, q_len) are decided by the table, 2 of them away from xqa-decode" in line
    assert "sha256:" in line and "active" in line and "misses get stock" in line
    assert made.choose(1, 4).moved


def test_the_line_is_seen_where_only_warnings_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    chooser(tmp_path, Miss.STOCK)
    assert "are decided by the table" in caplog.text


def test_row_ends_are_cut_at_the_engines_context() -> None:
    assert row_ends(tables.table(), tables.KIND, tables.BF16, 300) == (256, 300)
    assert row_ends(None, tables.KIND, tables.BF16, 300) == ()


@pytest.mark.parametrize(
    ("given", "mode", "miss"),
    [
        ({}, Mode.OFF, Miss.STOCK),
        ({"AUTOTUNE_MODE": "route"}, Mode.OFF, Miss.STOCK),
        ({"AUTOTUNE_TABLE": "x.yaml"}, Mode.ROUTE, Miss.STOCK),
        ({"AUTOTUNE_TABLE": "x.yaml", "AUTOTUNE_MODE": "observe"}, Mode.OBSERVE, Miss.STOCK),
        ({"AUTOTUNE_TABLE": "x.yaml", "AUTOTUNE_MISS": "fallback"}, Mode.ROUTE, Miss.FALLBACK),
        ({"AUTOTUNE_TABLE": "x.yaml", "AUTOTUNE_MODE": "off"}, Mode.OFF, Miss.STOCK),
    ],
)
def test_environment(given: dict[str, str], mode: Mode, miss: Miss) -> None:
    found = read_settings(given)
    assert (found.mode, found.miss, found.problem) == (mode, miss, "")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AUTOTUNE_MODE", "on", "'on' is not a valid Mode; AUTOTUNE_MODE: off, observe or route; off"),
        ("AUTOTUNE_MISS", "no", "'no' is not a valid Miss; AUTOTUNE_MISS: stock or fallback; off"),
    ],
)
def test_a_value_without_meaning_is_off_and_one_line(
    name: str, value: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = read_settings({"AUTOTUNE_TABLE": "x", name: value})
    assert (found.mode, found.problem) == (Mode.OFF, said)
    assert start(found, "sglang") is None
    assert len(caplog.records) == 1


def test_a_folder_gives_the_table_that_fits(tmp_path: Path) -> None:
    wanted = tables.write(tmp_path / "h200.sglang.yaml")
    tables.write(tmp_path / "h200.vllm.yaml", "vllm")
    (tmp_path / "torn.yaml").write_text("schema: x")
    assert find_table(tmp_path, CUDA_FACTS, "sglang") == wanted
    assert find_table(wanted, FACTS, "sglang") == wanted
    with pytest.raises(ValueError, match="no table for engine sglang fits this machine"):
        find_table(tmp_path, FACTS, "sglang")
    tables.write(tmp_path / "again.sglang.yaml")
    with pytest.raises(ValueError, match="name one file"):
        find_table(tmp_path, CUDA_FACTS, "sglang")


@pytest.mark.parametrize(
    ("engine", "facts", "said"),
    [
        ("sglang", FACTS, "the engine runs as without a table"),
        ("vllm", CUDA_FACTS, "measured for engine sglang"),
    ],
)
def test_a_table_of_elsewhere_is_off_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: str, facts: Any, said: str
) -> None:
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(facts.to_dict()))
    table = tables.write(tmp_path / "t.yaml")
    assert start(Settings(table, Mode.ROUTE, facts=file), engine) is None
    ours = [record.getMessage() for record in caplog.records if record.name == "autotune.engines"]
    assert len(ours) == 1 and said in ours[0]


def test_a_missing_table_is_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert start(Settings(tmp_path / "none.yaml", Mode.ROUTE, facts=tmp_path / "no.json"), "sglang") is None
    assert "sglang" in caplog.text
