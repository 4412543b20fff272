"""The GPU loop's dry run: the same file, a stand-in for FlashInfer, small sizes."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.arena.host_mmap import HostMmapArena
from autotune.engines.choice import Chooser
from autotune.router import Router
from benchmarks import ending, engine_loop
from benchmarks.ending import Pulse
from tests.engines import standin, tables
from tests.engines.tables import BF16, FMHA, KIND, XQA
from tests.table.samples import CUDA_FACTS

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


@pytest.mark.parametrize("name", ["choose", "refused"])
def test_the_forced_chooser_is_called_as_the_real_one(name: str) -> None:
    """The hook calls it in a chooser's place, and no type says so."""
    real = inspect.signature(getattr(Chooser, name))
    forced = inspect.signature(getattr(engine_loop.Forced, name))
    assert forced.parameters.keys() == real.parameters.keys()


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
    assert found["soak"]["verified"] == found["soak"]["steps"] > 0 and found["soak"]["seconds"] > 0.1
    assert found["canaries"] == "intact" and min(found["setup_seconds"], found["timing_seconds"]) >= 0.0
    assert "cut" not in found
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
    assert found["soak"].pop("seconds") >= 0.0
    assert found["soak"] == {"steps": 1, "launches": 1, "verified": 1, "worst_error": 0.5}
    assert "cut" not in found


def test_a_file_that_cannot_be_written_is_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Router, "load", lambda *_, **__: pytest.fail("it has begun"))
    with pytest.raises(SystemExit, match="2"):
        soaked(tables.write(tmp_path / "t.yaml"), tmp_path / "none" / "loop.json", monkeypatch)
    assert "loop.json: No such file or directory" in capsys.readouterr().err


def soaked(table: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """A small soak in this process; what it wrote, with its exit status."""
    small = ("--layers", "1", "--batch", "1", "--max-kv", "70", "--verify-every", "1", "--part", "soak")
    asked = ["engine_loop", "--device", "cpu", "--table", str(table), "--json", str(out), *small, *arguments]
    monkeypatch.setattr(sys, "argv", asked)
    status = engine_loop.main()
    return {**json.loads(out.read_text()), "status": status}


@pytest.mark.parametrize("overwritten", [[], ["kv0: 8 bytes after the end, from offset 0"]])
def test_a_soak_that_is_cut_says_so_and_looks_at_its_canaries(
    overwritten: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, seen = tmp_path / "loop.json", list[dict[str, Any]]()

    def error(engine: engine_loop.Engine, size: int, layer: int) -> float:
        if len(seen) == 2:
            signal.raise_signal(signal.SIGTERM)
        seen.append(json.loads(out.read_text()) if out.exists() else {})
        return 0.0

    class Often(Pulse):
        def beat(self, now: float, text: str) -> bool:
            return True

    monkeypatch.setattr(engine_loop, "Pulse", Often)
    monkeypatch.setattr(engine_loop.Engine, "error", error)
    monkeypatch.setattr(HostMmapArena, "overwritten", lambda arena: overwritten)
    found = soaked(tables.write(tmp_path / "t.yaml"), out, monkeypatch, "--seconds", "600")
    assert found["cut"] == "stopped by a signal" and found["soak"]["steps"] == 2
    # what a kill would have left after the first step
    assert (seen[1]["cut"], seen[1]["soak"]["steps"]) == ("not finished", 1)
    if overwritten:
        assert found["status"] == 1 and found["failed"] == f"canaries were overwritten: {overwritten[0]}"
        assert f"engine_loop: {found['failed']}" in capsys.readouterr().err
    else:
        assert (found["status"], found["canaries"]) == (0, "intact") and "failed" not in found


def test_the_set_up_takes_nothing_of_the_soaks_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float] = []
    monkeypatch.setattr(ending.End, "allow", lambda end, seconds: allowed.append(seconds))
    monkeypatch.setattr(engine_loop.Engine, "error", lambda *_: 0.0)
    found = soaked(tables.write(tmp_path / "t.yaml"), tmp_path / "loop.json", monkeypatch, "--seconds", "0.3")
    assert allowed == [engine_loop.SETUP_S, 0.3]  # counted anew
    assert "cut" not in found and found["soak"]["seconds"] >= 0.3


def test_everything_follows_the_seed(tmp_path: Path) -> None:
    (entry,) = tables.table().entries
    settings = engine_loop.Settings("cpu", 1, (1, 2), 70, 1.0, 1.0, 1, 1, False, 3)

    def drawn(seed: int, noise: int) -> list[torch.Tensor]:
        torch.manual_seed(noise)
        engine = engine_loop.Engine(
            entry, replace(settings, seed=seed), lambda name, shape, dtype: torch.zeros(shape, dtype=dtype)
        )
        engine.renew(2)
        return [engine.query, engine.pools[0], engine.tables[2], engine.lens[2]]

    first = drawn(3, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(3, 2), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, drawn(4, 1), strict=True))


def test_a_forced_kernel_is_no_capture_of_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with standin.installed():
        router = Router.load(tables.write(tmp_path / "t.yaml"), facts=CUDA_FACTS)
        engine: Any = SimpleNamespace(scratch=torch.zeros(1, dtype=torch.uint8))
        with engine_loop.as_mode("always-decode", router, engine, FMHA) as hook:
            assert hook is not None
            chooser = hook.runtime.chooser(
                KIND, BF16, max_context=512, stock=XQA, fallback=FMHA, deployable=frozenset()
            )
            assert chooser.choose(1, 4).why == "forced"
            hook.runtime.recorded(chooser, 1, 4, XQA)
            assert not hook.runtime.status.recapture
    assert "not noted" not in caplog.text


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
