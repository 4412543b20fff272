"""Trials in guarded memory, and a child in which a planted kernel may die."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autotune.arena import fault
from autotune.arena.base import Arena, Placement
from autotune.arena.factory import open_arena
from autotune.checks import registry
from autotune.checks.base import MakeArena, Trial
from autotune.checks.controls import COLUMN, KV_LENS
from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult, FailureKind
from autotune.routes.base import Route

FACTS = Facts("cpu", {}, {})

torch.set_num_threads(1)

MakeTrial = Callable[..., Trial]
RunForked = Callable[[str, Trial], "FailureKind | CheckResult"]


def _guarded(slack: int) -> MakeArena:
    def make(placement: Placement) -> Arena:
        return open_arena("host_mmap", "cpu", placement, slack)

    return make


@pytest.fixture(name="make_trial")
def _make_trial() -> MakeTrial:
    """``make_trial(route, column, ...)``: a trial on the CPU in guarded memory."""

    def make(
        route: Route,
        column: Column = COLUMN,
        kv_lens: tuple[int, ...] = KV_LENS,
        *,
        seed: int = 1,
        slack: int = 0,
        pad_value: int = 1,
        launched: Callable[[str], None] = lambda text: None,
        make_arena: MakeArena | None = None,
    ) -> Trial:
        return Trial(
            route=route,
            column=replace(column, pad_value=pad_value),
            facts=FACTS,
            kv_lens=kv_lens,
            seed=seed,
            device="cpu",
            make_arena=make_arena or _guarded(slack),
            launched=launched,
            pad_value=pad_value,
            slack=slack,
        )

    return make


@pytest.fixture(name="run_forked")
def _run_forked() -> RunForked:
    """Run a check in a fork: its row, or the kind of its death (a hang after two seconds)."""
    return _forked


def _forked(check: str, trial: Trial) -> FailureKind | CheckResult:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()  # pytest's would print a traceback of a death that is wanted
        fault.install(write_end)
        try:
            row = registry.get(check).run(trial)
            os.write(write_end, json.dumps(row.to_dict()).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(write_end)
    deadline, data = time.monotonic() + 2.0, b""
    try:
        while True:
            ready, _, _ = select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return FailureKind.HANG
            chunk = os.read(read_end, 65536)
            if not chunk:
                break
            data += chunk
    finally:
        os.close(read_end)
    _, status = os.waitpid(child, 0)
    line = json.loads(data) if data else {}
    if os.WIFSIGNALED(status):
        return FailureKind.ILLEGAL_ACCESS if line.get("inside_hole") else FailureKind.CRASH
    assert os.WEXITSTATUS(status) == 0 and line, f"status {status}, {data!r}"
    return CheckResult.from_dict(line)
