"""A stored command under a compute-sanitizer that prints, hangs, floods, refuses, or is not there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from autotune.checks.controls import CPU
from autotune.domain.fingerprint import Facts
from autotune.sanitizer import tool
from autotune.sanitizer.examine import Ended, examine
from autotune.sanitizer.process import capture
from autotune.tuner.prover import repro_command
from autotune.worker.jobs import ProveJob
from tests.sanitizer import outputs
from tests.sanitizer.fake import Fake

REPRO = (
    "autotune prove xqa-decode --column '{\"q_len\":4}' --check reference --kv-lens 64,300 --seed 7 "
    "--device cuda"
)


@pytest.mark.parametrize(
    ("output", "note"),
    [
        (
            outputs.AFTER,
            "sanitizer: invalid global read of 4 bytes at 0x79fd33fd0980, 129 bytes after an allocation of "
            "4,000,000 bytes, in kernel_mha, thread (96,0,0) of block (3906,0,1); 96 errors in all",
        ),
        (
            outputs.MISALIGNED,
            "sanitizer: misaligned global write of 4 bytes at 0x710fdca00001, inside an allocation of 4 "
            "bytes, in unaligned_kernel, thread (0,0,0) of block (0,0,0)",
        ),
    ],
)
def test_a_finding(fake: Fake, output: str, note: str) -> None:
    fake.says(output, status=1)
    found = examine(fake.path, REPRO)
    assert (found.ended, found.said, found.note) == (Ended.FOUND, "", note)


def test_on_one_of_several_gpus(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.says(outputs.CLEAN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    examine(fake.path, REPRO, device="cuda:1")
    examine(fake.path, REPRO)
    assert [call.env["CUDA_VISIBLE_DEVICES"] for call in fake.calls] == ["6", "4,6"]


def test_how_it_is_called(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    fake.says(outputs.CLEAN)
    assert examine(fake.path, REPRO, timeout_s=100).ended is Ended.NOTHING
    (call,) = fake.calls
    place = call.argv.index(sys.executable)
    options, program = call.argv[:place], call.argv[place:]
    assert options[:4] == ["--tool", "memcheck", "--report-api-errors", "no"]
    assert program[1:4] == ["-m", "autotune.cli.main", "prove"]
    assert program[4:7] == ["xqa-decode", "--column", '{"q_len":4}']
    assert program[-3:] == ["--arena", "plain", "--in-process"]
    assert call.env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert (call.env["LC_ALL"], call.env[tool.LIMIT_VARIABLE]) == ("C", "110")
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(call.env)
    assert call.group != os.getpgid(0)


def test_a_captured_launch_keeps_torchs_cache(fake: Fake) -> None:
    fake.says(outputs.CLEAN)
    examine(fake.path, REPRO.replace("reference", "graph_replay"))
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in fake.calls[0].env


def test_no_finding(fake: Fake) -> None:
    fake.says(outputs.CLEAN, status=1)
    found = examine(fake.path, REPRO)
    assert (found.ended, found.first, found.note) == (Ended.NOTHING, None, "sanitizer: no finding")


def test_it_hangs(fake: Fake) -> None:
    fake.says(outputs.BANNER, sleep=600)
    found = examine(fake.path, REPRO, timeout_s=3.0)
    assert (found.ended, found.note) == (Ended.LATE, "sanitizer: not finished in 3 s")


def test_a_finding_counts_though_it_hangs_afterwards(fake: Fake) -> None:
    fake.says(outputs.BEFORE, sleep=600)
    assert examine(fake.path, REPRO, timeout_s=3.0).ended is Ended.FOUND


@pytest.mark.parametrize(("output", "ended"), [(outputs.BANNER, Ended.FAILED), (outputs.BEFORE, Ended.FOUND)])
def test_it_prints_100_mebibytes(fake: Fake, output: str, ended: Ended) -> None:
    fake.says(output, mebibytes=100)
    found = examine(fake.path, REPRO)
    assert found.ended is ended
    assert len(found.note) < 300


@pytest.mark.parametrize(
    ("output", "status", "ended", "said"),
    [
        (outputs.UNSUPPORTED, 1, Ended.REFUSED, "does not work on this device: Device not supported."),
        (outputs.NO_LAUNCH, 255, Ended.FAILED, "Target application terminated before first instrumented"),
        ("", 3, Ended.REFUSED, "compute-sanitizer ended with status 3, no report"),
        (
            "loader: libsanitizer.so: not found\n",
            127,
            Ended.REFUSED,
            "status 127, no report; last output: loader",
        ),
    ],
)
def test_it_does_not_work(fake: Fake, output: str, status: int, ended: Ended, said: str) -> None:
    fake.says(output, status=status)
    found = examine(fake.path, REPRO)
    assert (found.ended, found.first) == (ended, None)
    assert said in found.note
    assert "\n" not in found.note


def test_it_cannot_be_run(tmp_path: Path) -> None:
    path = tmp_path / "compute-sanitizer"
    path.write_text("\x7fELF and no more")
    path.chmod(0o755)
    found = examine(path, REPRO)
    assert found.ended is Ended.REFUSED
    assert f"{path} cannot be run (Exec format error)" in found.note


def test_only_stored_proofs_are_run(fake: Fake) -> None:
    for repro in ("", "rm -rf /", "autotune run --gpu cpu"):
        with pytest.raises(ValueError, match="not a command of autotune prove"):
            examine(fake.path, repro)
    assert fake.calls == []


def test_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    assert tool.find() == fake.path
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    installed = tmp_path / "cuda" / "compute-sanitizer" / "compute-sanitizer"
    assert tool.find() in (None, Path("/usr/local/cuda/bin/compute-sanitizer"))
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    assert tool.find() != installed  # it cannot be executed
    installed.chmod(0o755)
    assert tool.find() == installed


def test_the_stored_command_runs_in_plain_memory_in_one_process(fake: Fake) -> None:
    """What the tool is given is a command that runs: here on the CPU, where there is nothing to find."""
    job = ProveJob(
        route="planted-full-mask",
        check="reference",
        column=CPU.usual.to_dict(),
        facts=Facts("cpu", {}, {}).to_dict(),
        kv_lens=(64, 300),
        seed=7,
        device="cpu",
        arena_kind="host_mmap",
    )
    fake.says("========= ERROR SUMMARY: 0 errors\n", runs=True)
    words = tool.command(fake.path, repro_command(job))
    got = capture(words, tool.environment(repro_command(job), 100.0), 100.0)
    assert got.status == 1, got.output
    assert "failed          reference        wrong_output" in got.output
    assert "operands not guarded, so no proof" in got.output
    assert json.loads(fake.calls[0].argv[fake.calls[0].argv.index("--column") + 1]) == job.column
