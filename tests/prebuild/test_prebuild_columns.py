"""``prebuild --columns``: a list of columns in a space's stead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import main
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.prebuild import build, toolchain
from autotune.prebuild.columns import ColumnsError, read
from autotune.prebuild.manifest import Manifest
from autotune.space.library import profile_file

COLUMNS = [
    Column(Shape(7, 1, 128, 16), PROFILES["bf16"], 12, 3, 4096),
    Column(Shape(8, 1, 64, 128, sinks=True, window_left=127), PROFILES["fp8"], 5, 3, 4096, pad_value=0),
]


def run(*arguments: str) -> int:
    """The command's exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["prebuild", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture(name="listed")
def _listed(tmp_path: Path) -> Path:
    path = tmp_path / "columns.json"
    path.write_text(json.dumps([column.to_dict() for column in [*COLUMNS, COLUMNS[0]]]))
    return path


def test_columns_come_back_as_they_are_stored_each_once(listed: Path) -> None:
    assert read(listed) == COLUMNS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read as JSON: No such file"),
        ("{", "cannot be read as JSON: Expecting property name"),
        ("[" * 200_000, "cannot be read as JSON: it is nested too deeply"),
        ("[]", "must hold a JSON list of stored columns, one at least"),
        ('{"shape": {}}', "must hold a JSON list"),
        ("[1]", "entry 0 is not a stored column: 'int' object"),
        ('[{"q_len": 4}]', "entry 0 is not a stored column: no 'shape'"),
        ('[{"shape": {"heads": 8}}]', "entry 0 is not a stored column: unknown shape key 'heads'"),
    ],
)
def test_what_is_no_such_list_is_one_line_and_exit_2(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "columns.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ColumnsError, match=said.partition("'")[0]):
        read(path)
    assert run("--gpu", "h200", "--columns", str(path), "--list") == 2
    printed = capsys.readouterr().err
    assert str(path) in printed and said in printed and printed.count("\n") == 1


def test_not_beside_a_space(listed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--space", str(profile_file("h200")), "--columns", str(listed), "--list") == 2
    assert "give one of them" in capsys.readouterr().err


def test_exactly_these_are_asked_for_and_built(
    listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[Any, ...]] = []

    def modules_of(columns: Any, facts: Any, **more: Any) -> dict[str, list[str]]:
        seen.append((list(columns), facts.hardware["compute_capability"], more["selftest"], more["routes"]))
        return {"xqa_x": ["xqa-decode"]}

    def prebuild(columns: Any, facts: Any, tools: Any, out: Any, **more: Any) -> build.Outcome:
        seen.append((list(columns), facts.hardware["compute_capability"], more["selftest"], more["routes"]))
        return build.Outcome(Manifest("0.7.2", "", "", "13.0", "9.0"))

    monkeypatch.setattr(build, "modules_of", modules_of)
    monkeypatch.setattr(build, "prebuild", prebuild)
    monkeypatch.setattr(toolchain, "find", lambda include: None)
    common = ("--gpu", "h200", "--columns", str(listed), "--route", "xqa-decode", "--out", str(tmp_path))
    assert run(*common, "--list") == 0
    assert capsys.readouterr().out == "xqa_x  [xqa-decode]\n"
    assert run(*common) == 0
    assert run("--gpu", "h200", "--columns", str(listed), "--out", str(tmp_path)) == 0
    # the self-test's module is no column of the list
    assert seen[:2] == [(COLUMNS, "9.0", False, ["xqa-decode"])] * 2
    assert seen[2][:3] == (COLUMNS, "9.0", False) and "fa2" in seen[2][3]
