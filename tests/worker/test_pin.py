"""A child that is tied to one of several devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from autotune.domain.verdict import UnprovenReason
from autotune.worker.base import Broken, Completed, JobError, Outcome, WorkerError
from autotune.worker.pin import VISIBLE, pin, visible
from autotune.worker.presence import ATTEMPTS, PresenceJob, trouble
from autotune.worker.worker import Worker


@pytest.mark.parametrize(
    ("index", "listed", "wanted"),
    [
        (0, None, "0"),
        (3, None, "3"),
        (1, "4,6", "6"),
        (0, " 7 ,1", "7"),
        (1, "GPU-1f,GPU-2a", "GPU-2a"),
        (0, "MIG-3c", "MIG-3c"),
    ],
)
def test_what_the_child_is_shown(index: int, listed: str | None, wanted: str) -> None:
    environ = {} if listed is None else {VISIBLE: listed}
    pin(f"cuda:{index}", environ)
    assert environ == {VISIBLE: wanted}


@pytest.mark.parametrize(("index", "listed"), [(1, "0"), (0, ""), (1, "0,")])
def test_a_device_that_is_not_shown(index: int, listed: str) -> None:
    with pytest.raises(ValueError, match=f"no device cuda:{index}: CUDA_VISIBLE_DEVICES is"):
        visible(index, listed)


def test_no_index_ties_to_nothing() -> None:
    environ: dict[str, str] = {}
    before = os.sched_getaffinity(0)
    pin("cuda", environ)
    pin("cpu", environ)
    assert environ == {}
    assert os.sched_getaffinity(0) == before


@pytest.fixture(scope="module")
def last() -> Iterator[tuple[Worker, int]]:
    """A worker on the last core, and that core's number."""
    cores = sorted(os.sched_getaffinity(0))
    with Worker(f"cpu:{len(cores) - 1}") as worker:
        yield worker, cores[-1]


def test_a_child_keeps_to_its_core(last: tuple[Worker, int]) -> None:
    worker, core = last
    before = os.sched_getaffinity(0)
    assert worker.run(PresenceJob("cpu"), timeout_s=60.0) == Completed(str(core))
    assert worker.pid is not None
    assert os.sched_getaffinity(worker.pid) == {core}
    assert os.sched_getaffinity(0) == before


def test_a_child_has_the_device_that_is_expected(last: tuple[Worker, int]) -> None:
    worker, core = last
    assert trouble(worker, "cpu") is None
    assert trouble(worker, "cpu", str(core)) is None
    assert trouble(worker, "cpu", "none") == f"its child has another device, {core} instead of none"


def test_a_core_that_is_not_there() -> None:
    with Worker("cpu:4096") as worker:
        with pytest.raises(WorkerError, match="died while starting: ValueError: no core 4096"):
            worker.run(PresenceJob("cpu"), timeout_s=60.0)
        assert trouble(worker, "cpu") is not None


class Answers:
    """Outcomes in turn, the last one for ever."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.asked = 0

    def run(self, job: Any, **options: Any) -> Outcome:
        self.asked += 1
        return self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]


def test_a_spoilt_child_is_not_a_lost_device() -> None:
    lost = Broken(UnprovenReason.INFRASTRUCTURE, "no CUDA-capable device is detected", "")
    assert trouble(Answers(lost, Completed("x")), "cuda", "x") is None
    gone = Answers(lost)
    assert trouble(gone, "cuda", "x") == "it does not answer: no CUDA-capable device is detected"
    assert gone.asked == ATTEMPTS
    wrong = Answers(JobError("RuntimeError", "the device adds 64 ones up to 63.0"))
    assert trouble(wrong, "cuda") == "it does not answer: the device adds 64 ones up to 63.0"
