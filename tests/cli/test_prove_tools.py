"""``prove`` for tools that watch it: in this process, in plain memory, with compute-sanitizer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.checks.controls import CPU
from autotune.cli import prove as prove_command
from autotune.cli.exits import CliError
from autotune.cli.in_process import Journal, limit_time, prove_here
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.sanitizer.tool import LIMIT_VARIABLE
from autotune.worker.base import Channel
from autotune.worker.jobs import ProveJob
from tests.console import cli, script
from tests.sanitizer import outputs
from tests.sanitizer.fake import Fake

COMMON = ["--column", json.dumps(CPU.usual.to_dict()), "--kv-lens", "64,300", "--check", "reference"]
HERE = [*COMMON, "--device", "cpu", "--in-process"]


def job(route: str, check: str = "reference") -> ProveJob:
    return ProveJob(
        route=route,
        check=check,
        column=CPU.usual.to_dict(),
        facts=Facts("cpu", {}, {}).to_dict(),
        kv_lens=(64, 300),
        seed=7,
        device="cpu",
        arena_kind="plain",
    )


def test_a_route_that_does_not_support_the_column_is_not_run() -> None:
    """What a library raises of a call that nobody would make is no verdict on its kernel."""
    for flags in ([*COMMON, "--device", "cpu"], HERE):
        result = cli("prove", "xqa-decode", *flags, "--json")
        assert (result.code, result.out) == (1, "")
        assert "xqa-decode in " in result.err and ": unsupported: XQA " in result.err
        assert len(result.err.splitlines()) == 1


def test_a_third_partys_supports_that_raises_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*given: object) -> str:
        raise RuntimeError("boom")

    monkeypatch.setattr("autotune.worker.jobs.child_route", lambda name: SimpleNamespace(supports=raises))
    with pytest.raises(CliError, match="unsupported: it raised RuntimeError: boom"):
        prove_command.command("theirs", COMMON[1], COMMON[3], device="cpu", arena="guarded")


def test_in_this_process_it_comes_to_what_the_child_comes_to() -> None:
    flags = [*COMMON, "--device", "cpu", "--seed", "7", "--json"]
    isolated = cli("prove", "torch-splitkv", *flags)
    here = cli("prove", "torch-splitkv", *flags, "--in-process")
    assert (isolated.code, here.code) == (0, 0)
    assert here.json == isolated.json


def test_plain_memory_is_said() -> None:
    result = cli("prove", "torch-splitkv", *HERE, "--arena", "plain")
    assert result.code == 0, result.err
    assert "operands not guarded, so no proof)" in result.out
    assert "no proof" not in cli("prove", "torch-splitkv", *HERE).out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--arena", "padded"], "--arena padded: guarded or plain"),
        (["--sanitizer"], "--sanitizer needs a GPU"),
    ],
)
def test_asked_wrongly(flags: list[str], said: str) -> None:
    result = cli("prove", "torch-splitkv", *HERE, *flags)
    assert result.code == 2
    assert said in result.line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 2 * 10**12}, "one call's operands do not fit"),
        ({"batch_size": 10**400}, "one call's operands do not fit"),
        ({"max_context": 10**15}, "one call's operands do not fit"),
        (None, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("where", [(), ("--in-process",)])
def test_a_column_that_cannot_be_held(
    change: dict[str, int] | None, said: str, where: tuple[str, ...]
) -> None:
    column = "[" * 100_000 if change is None else json.dumps(CPU.usual.to_dict() | change)
    flags = ["--kv-lens", "64", "--check", "reference", "--device", "cpu", *where]
    result = cli("prove", "torch-splitkv", "--column", column, *flags)
    assert result.code == 2
    assert said in result.line


def test_a_fault_ends_the_command_by_its_signal(tmp_path: Path) -> None:
    result = script("prove", "planted-null-pointer", *HERE, folder=tmp_path)
    assert result.code == -signal.SIGSEGV


def test_time_is_limited_where_it_is_asked_for() -> None:
    code = "import time; from autotune.cli.in_process import limit_time; limit_time(); time.sleep(600)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, LIMIT_VARIABLE: "1"}, timeout=100, check=False
    )
    assert done.returncode == -signal.SIGALRM
    before = signal.getsignal(signal.SIGALRM)
    limit_time()  # nothing is asked for here
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize(
    ("route", "status", "kind"),
    [
        ("torch-sdpa", CheckStatus.PASSED, None),
        ("planted-full-mask", CheckStatus.FAILED, FailureKind.WRONG_OUTPUT),
    ],
)
def test_rows(route: str, status: CheckStatus, kind: FailureKind | None) -> None:
    row = prove_here(job(route))
    assert (row.check, row.status, row.kind) == ("reference", status, kind)


@pytest.mark.parametrize(
    ("raised", "step", "status", "blame"),
    [
        (
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            "reference/tail: launch",
            CheckStatus.FAILED,
            FailureKind.ILLEGAL_ACCESS,
        ),
        (RuntimeError("CUDA out of memory"), "", CheckStatus.UNPROVEN, UnprovenReason.OUT_OF_MEMORY),
        (KeyError("ours"), "", CheckStatus.UNPROVEN, UnprovenReason.INFRASTRUCTURE),
    ],
)
def test_what_a_job_raises(
    raised: Exception,
    step: str,
    status: CheckStatus,
    blame: FailureKind | UnprovenReason,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dies(self: ProveJob, channel: Channel) -> dict[str, object]:
        channel.step("reference/tail: first")
        channel.step(step)
        raise raised

    monkeypatch.setattr(ProveJob, "__call__", dies)
    row = prove_here(job("torch-sdpa"))
    assert (row.status, row.kind or row.reason) == (status, blame)
    assert row.launches == 1 + bool(step)


def test_the_journal_knows_alternating_steps() -> None:
    journal = Journal()
    enter = journal.among(["a", "b"])
    assert journal.step_text == ""
    enter(1)
    assert journal.step_text == "b"
    enter(None)
    assert (journal.step_text, journal.steps, journal.ask("?")) == ("", 0, None)


def test_a_finding_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake.on_path(tmp_path, monkeypatch)
    fake.says(outputs.MISALIGNED)
    row = CheckResult("reference", 1, CheckStatus.FAILED, 7, kind=FailureKind.MISALIGNED, detail="CUDA error")
    shown = prove_command._examined(row, job("torch-sdpa"), fake.path)
    assert shown.detail.startswith("CUDA error; sanitizer: misaligned global write of 4 bytes at ")
    assert "torch-sdpa" in fake.calls[0].argv
    passed = CheckResult("reference", 1, CheckStatus.PASSED, 7)
    assert prove_command._examined(passed, job("torch-sdpa"), fake.path) == passed
    assert prove_command._examined(row, job("torch-sdpa"), None) == row
    assert len(fake.calls) == 1


def test_a_tool_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.sanitizer.tool.find", lambda: None)
    with pytest.raises(CliError, match="neither on PATH nor in CUDA_HOME"):
        prove_command._tool("cuda")


def test_run_has_a_flag_for_it() -> None:
    assert "--no-sanitizer" in cli("run", "--help").out
