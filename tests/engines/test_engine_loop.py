"""The GPU loop's dry run: the same file, a stand-in for FlashInfer, small sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import engine_loop
from tests.engines import tables

ROOT = Path(__file__).resolve().parents[2]


def loop(table: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "benchmarks/engine_loop.py", "--device", "cpu", "--table", str(table)),
            *("--layers", "2", "--batch", "1,2,4", "--max-kv", "300", "--seconds", "0.2", "--rounds", "1"),
            *("--verify-every", "1", "--json", str(out), *arguments),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "loop.json"
    done = loop(tables.write(tmp_path / "t.yaml"), out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["arena"] == "host_mmap"
    assert found["captured"]["install"] == {
        "fmha-v2: not_faster": 2,
        "xqa-decode: proven_faster": 2,
        "xqa-decode: rows_disagree": 2,
    }
    assert found["captured"]["always-fallback"] == {"fmha-v2: forced": 6}
    assert found["captured"]["always-decode"] == {"xqa-decode: forced": 6}
    assert found["soak"]["verified"] == found["soak"]["steps"] > 0
    assert 0 < found["soak"]["worst_error"] <= found["error_bound"]
    assert set(found["per_step"]) == {"1", "2", "4"}
    assert all(
        each["rounds"] == 1 and set(each) == {"rounds", *engine_loop.MODES}
        for each in found["per_step"].values()
    )


def test_a_part_by_itself(tmp_path: Path) -> None:
    table, out = tables.write(tmp_path / "t.yaml"), tmp_path / "loop.json"
    assert loop(table, out, "--part", "soak").returncode == 0
    found = json.loads(out.read_text())
    assert found["soak"]["verified"] > 0 and "per_step" not in found and set(found["captured"]) == {"install"}
    assert loop(table, out, "--part", "timing", "--rounds", "9", "--timing-seconds", "0").returncode == 0
    found = json.loads(out.read_text())
    # no time is one round each, so that every size has a number
    assert {size: each["rounds"] for size, each in found["per_step"].items()} == {"1": 1, "2": 1, "4": 1}
    assert "soak" not in found and len(found["captured"]) == 3


def test_a_wrong_number_is_told_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = tables.write(tmp_path / "t.yaml"), tmp_path / "loop.json"
    small = ("--layers", "1", "--batch", "1", "--max-kv", "70", "--verify-every", "1", "--part", "soak")
    asked = ["engine_loop", "--device", "cpu", "--table", str(table), "--json", str(out), *small]
    monkeypatch.setattr(sys, "argv", asked)
    monkeypatch.setattr(engine_loop.Engine, "error", lambda *_: 0.5)
    assert engine_loop.main() == 1
    printed = capsys.readouterr()
    assert "engine_loop: step 1, batch 1, lengths [" in printed.err and "error 0.5 exceeds" in printed.err
    found = json.loads(out.read_text())
    assert found == json.loads(printed.out) and found["failed"].startswith("step 1, ")
    assert found["soak"] == {"steps": 1, "launches": 1, "verified": 1, "worst_error": 0.5}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--heads", "6,1,128"), "no bf16 entry of heads"),
        (("--q-len", "3"), "no bf16 entry"),
        (("--max-kv", "9999"), "--max-kv must lie in 4..512"),
    ],
)
def test_refusals_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    table = tables.write(tmp_path / "t.yaml")
    monkeypatch.setattr(sys, "argv", ["engine_loop", "--device", "cpu", "--table", str(table), *arguments])
    with pytest.raises(SystemExit) as ended:
        engine_loop.main()
    assert said in str(ended.value.code) and "\n" not in str(ended.value.code)
