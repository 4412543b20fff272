"""``scripts/draft_extend_story.py`` on the CPU: it shows what it is for, and says so where it does not."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines import tables

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "draft_extend_story.py"
PAGE = ROOT / "docs" / "h200.md"


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("draft_extend_story", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


story = _module()


@pytest.fixture
def hooked_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 2 and 3 by themselves: step 1 starts a child."""
    monkeypatch.setattr(story, "unprotected", lambda _: [])


def _words(text: str) -> str:
    """Without what a machine's arithmetic and line ends may change: the last digits of errors."""
    return re.sub(r"error \d\S*", "error #", " ".join(text.split()))


def test_all_three_steps_and_the_last_two_as_a_gpu_had_them() -> None:
    """Steps 2 and 3 of the page's quote, made with real kernels, are what the stand-ins say too."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "illegal_access: SIGSEGV, page_table_built: 0 bytes past the end" in _words(done.stdout)
    hooked = done.stdout[done.stdout.index("2 refused: ") :]
    assert f"{_words(hooked)} ```" in _words(PAGE.read_text())


def test_a_table_that_does_not_route_the_call_is_not_the_story(
    hooked_only: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # at batch 4 this table's rows name different kernels, so that a length that is not known is a miss
    assert story.main(["--table", str(tables.write(tmp_path / "t.yaml"))]) == 1
    refused, routed = re.split(r"^(?=3 )", capsys.readouterr().out, flags=re.MULTILINE)
    assert logging.root.manager.disable == logging.NOTSET  # as it was
    assert refused.startswith("2 refused: fmha-v2 at ") and "NOT AS TOLD" not in refused
    assert "rows_disagree" in routed and routed.endswith("   NOT AS TOLD\n")


def test_a_hook_that_refuses_nothing_is_not_the_story(
    hooked_only: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(story.flashinfer.Hook, "_broken", lambda *_: None)
    assert story.main([]) == 1
    assert "CUDA error: an illegal memory access was encountered" in capsys.readouterr().err


def test_no_child_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def lost(_: object) -> None:
        raise story.WorkerError("no child can be had")

    monkeypatch.setattr(story, "unprotected", lost)
    assert story.main([]) == 1
    assert capsys.readouterr().err == "draft_extend_story: no child can be had\n"


@pytest.mark.parametrize(
    ("table", "code", "said"),
    [
        ("nowhere.yaml", 2, "cannot be read"),
        ("tuned_configs/nvidia-h200.generic.yaml", 2, "its fallback fa2 plans on the host"),
    ],
)
def test_refusals_are_one_line(table: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert story.main(["--table", str(ROOT / table)]) == code
    line = capsys.readouterr().err
    assert line.startswith("draft_extend_story: ") and said in line and line.count("\n") == 1
