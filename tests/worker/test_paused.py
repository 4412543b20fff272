"""A machine that stood still, or a container that was paused, is no hang."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autotune.domain.verdict import FailureKind
from autotune.worker import worker as module
from autotune.worker.base import Completed, Failed
from autotune.worker.worker import Worker
from tests.worker.death_jobs import Add, HoldGil, Work


@contextmanager
def paused(pids: list[int], after_s: float, for_s: float) -> Iterator[None]:
    """Stops the processes for a while, ourselves among them."""
    all_ = " ".join(map(str, pids))
    script = f"sleep {after_s}; kill -STOP {all_}; sleep {for_s}; kill -CONT {all_}"
    with subprocess.Popen(["sh", "-c", script]) as process:
        yield
        process.wait()


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(module, "_SLICE_S", 0.2)
    with Worker("cpu", step_timeout_s=2.0) as worker:
        assert worker.run(Add(1, 1), timeout_s=30) == Completed(2)
        yield worker


def test_a_pause_of_both_counts_neither_for_the_step_nor_for_the_job(ready: Worker) -> None:
    assert ready.pid is not None
    with paused([ready.pid, os.getpid()], after_s=0.2, for_s=4.0):
        start = time.monotonic()
        assert ready.run(Work(0.4), timeout_s=3.5) == Completed(None)
        assert time.monotonic() - start > 4.0


def test_a_hang_is_still_one_after_the_pause(ready: Worker) -> None:
    assert ready.pid is not None
    with paused([ready.pid, os.getpid()], after_s=0.2, for_s=1.5):
        outcome = ready.run(HoldGil(), timeout_s=30)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.HANG


def test_a_pause_of_the_child_alone_is_one(ready: Worker) -> None:
    assert ready.pid is not None
    with paused([ready.pid], after_s=0.2, for_s=3.0):
        outcome = ready.run(Work(0.5), timeout_s=30)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.HANG
