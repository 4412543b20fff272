"""Answers belong to their jobs, even if a kernel forks and comes back twice."""

from __future__ import annotations

import pytest

from autotune.domain.verdict import UnprovenReason
from autotune.worker.base import Broken, Completed
from autotune.worker.worker import Worker
from tests.worker.death_jobs import Add
from tests.worker.fork_jobs import AnswerForAnother, Fork


@pytest.mark.parametrize("end", ["return", "step", "emit", "ask", "enter", "raise"])
def test_the_copy_never_speaks(worker: Worker, end: str) -> None:
    heard: list[int] = []
    outcome = worker.run(Fork(0, True, end), timeout_s=30, on_event=heard.append)
    assert (outcome == Completed(0)) is (end != "raise")
    assert heard == ([0] if end in ("emit", "ask") else [])
    for number in range(1, 6):
        assert worker.run(Fork(number, False), timeout_s=30) == Completed(number)


def test_an_answer_for_another_job_is_no_answer(worker: Worker) -> None:
    worker.run(Add(1, 1), timeout_s=30)
    before = worker.pid
    outcome = worker.run(AnswerForAnother(), timeout_s=30)
    assert isinstance(outcome, Broken), outcome
    assert outcome.reason is UnprovenReason.INFRASTRUCTURE
    assert "was answered for job" in outcome.detail
    assert worker.run(Add(1, 2), timeout_s=30) == Completed(3)
    assert worker.pid != before
