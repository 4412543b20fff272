"""What a death must not touch: the next job, another route, the parent. A test for each of the rules."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.worker import worker as worker_module
from autotune.worker.base import Broken, Completed, Failed, Outcome, ProtocolError
from autotune.worker.failure import OURS_STATUS, judge_death
from autotune.worker.inbox import MOST_BYTES, Inbox
from autotune.worker.jobs import ALONE_RUNS, prove, row_of
from autotune.worker.process import ChildProcess
from autotune.worker.worker import Worker
from tests.worker.death_jobs import Add
from tests.worker.deaths import MORTAL, Fault, MortalProve
from tests.worker.test_jobs import JOB

CLEAN = MortalProve(**{**vars(JOB), "route": MORTAL + "x"})


# --- a message is had once it is whole


@pytest.fixture
def pipe() -> Iterator[tuple[Inbox, int]]:
    read, write = os.pipe()
    yield Inbox(read), write
    os.close(read)
    os.close(write)


def frame(data: bytes, *, long: bool = False) -> bytes:
    header = struct.pack("!iQ", -1, len(data)) if long else struct.pack("!i", len(data))
    return header + data


@pytest.mark.parametrize("long", [False, True])
def test_a_message_in_pieces(pipe: tuple[Inbox, int], long: bool) -> None:
    inbox, write = pipe
    whole = frame(b"one", long=long)
    for place in range(len(whole)):
        assert list(inbox.messages()) == []
        assert inbox.pending == (place > 0)
        os.write(write, whole[place : place + 1])
        assert inbox.fill()
    assert list(inbox.messages()) == [b"one"]
    assert not inbox.pending


def test_several_messages_and_the_beginning_of_another(pipe: tuple[Inbox, int]) -> None:
    inbox, write = pipe
    os.write(write, frame(b"one") + frame(b"") + frame(b"three") + b"\x00\x00")
    assert inbox.fill()
    assert list(inbox.messages()) == [b"one", b"", b"three"]
    assert inbox.pending


@pytest.mark.parametrize("header", [struct.pack("!i", -2), struct.pack("!iQ", -1, MOST_BYTES + 1)])
def test_a_length_that_is_none(pipe: tuple[Inbox, int], header: bytes) -> None:
    inbox, write = pipe
    os.write(write, frame(b"one") + header)
    inbox.fill()
    messages = inbox.messages()
    assert next(messages) == b"one"
    with pytest.raises(ProtocolError):
        next(messages)


def test_the_end_of_file() -> None:
    read, write = os.pipe()
    os.close(write)
    assert not Inbox(read).fill()
    os.close(read)
    assert not Inbox(read).fill()  # nor does a closed one raise


# --- a child that is lost between two jobs is no fault of the second


@dataclass(frozen=True)
class SpeakAfterwards:
    """Sends something once its answer is out; or stops, or ends."""

    how: str

    def __call__(self, channel: Any) -> int:
        answer = channel.answer

        def answering(message: Any) -> None:
            answer(message)
            if self.how == "speak":
                channel._conn.send_bytes(pickle.dumps("unasked"))
            elif self.how == "half":
                os.write(channel._conn.fileno(), struct.pack("!i", 99) + b"half")
            else:
                os.kill(os.getpid(), signal.SIGSTOP if self.how == "stop" else signal.SIGKILL)

        channel.answer = answering
        return 1


@pytest.mark.parametrize("how", ["speak", "half", "stop", "die"])
def test_the_next_job_is_none_the_worse(how: str) -> None:
    with Worker("cpu", step_timeout_s=1.5) as worker:
        assert worker.run(SpeakAfterwards(how), timeout_s=30.0) == Completed(1)
        first = worker.pid
        assert worker.run(Add(1, 2), timeout_s=30.0) == Completed(3)
        assert worker.pid != first


def test_children_that_never_take_a_job_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Stillborn(ChildProcess):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            made.append(self.pid)
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(worker_module, "ChildProcess", Stillborn)
    with Worker("cpu", step_timeout_s=0.5) as worker:
        outcome = worker.run(Add(1, 2), timeout_s=30.0)
    detail = "no child took the job: it did not answer"
    assert outcome == Broken(UnprovenReason.INFRASTRUCTURE, detail, "")
    assert len(set(made)) == worker_module._MOST_CHILDREN


# --- a child that ran out of memory is replaced


@pytest.mark.parametrize("step", ["load", "judge", "answer"])
def test_a_spent_child_is_replaced(worker: Worker, step: str) -> None:
    row = prove(worker, replace(CLEAN, fault=Fault("memory", step)))
    assert (row.status, row.reason) == (CheckStatus.UNPROVEN, UnprovenReason.OUT_OF_MEMORY), row
    assert prove(worker, CLEAN).status is CheckStatus.PASSED


def test_a_child_that_cannot_go_on_accuses_nobody() -> None:
    judged = judge_death(OURS_STATUS, "reference/tail: launch", None, "Traceback ...\nKeyError: 'x'\n")
    assert judged.blame is UnprovenReason.INFRASTRUCTURE
    judged = judge_death(OURS_STATUS, "reference/tail: launch", None, "Traceback ...\nMemoryError\n")
    assert judged.blame is UnprovenReason.OUT_OF_MEMORY


# --- nothing is launched while a session is opened


@pytest.mark.parametrize("way", ["hang", "stop"])
def test_to_be_slow_in_opening_is_no_hang(worker: Worker, way: str) -> None:
    row = prove(worker, replace(CLEAN, fault=Fault(way, "open")), step_timeout_s=1.0)
    assert (row.status, row.reason) == (CheckStatus.UNPROVEN, UnprovenReason.INFRASTRUCTURE)
    assert row.detail.startswith("nothing was launched: no progress for 1 s (reference/tail: open for ")


# --- a death may be another route's


class Scripted:
    """Answers in turn."""

    def __init__(self, *answers: Outcome) -> None:
        self.left = list(answers)

    def run(self, job: Any, **limits: Any) -> Outcome:
        return self.left.pop(0)


PASSED = Completed(CheckResult("reference", 1, CheckStatus.PASSED, JOB.seed, launches=2).to_dict())
DEATH = Failed(FailureKind.CRASH, "SIGABRT", "launch", steps=1, after=("other",))


def test_a_death_after_other_routes_counts_once_it_comes_again_alone() -> None:
    script = Scripted(DEATH, PASSED, replace(DEATH, detail="SIGSEGV", after=()))
    row = prove(cast(Worker, script), JOB)
    assert (row.kind, row.detail) == (FailureKind.CRASH, "SIGSEGV (launch)")
    assert script.left == []


def test_a_death_after_other_routes_that_does_not_come_again_neither_accuses_nor_acquits() -> None:
    script = Scripted(DEATH, *[PASSED] * ALONE_RUNS)
    row = prove(cast(Worker, script), JOB)
    assert (row.status, row.reason) == (CheckStatus.UNPROVEN, UnprovenReason.UNCLEAR)
    assert "SIGABRT, after other in the same process" in row.detail
    assert script.left == []


def test_a_death_with_nobody_else_is_the_routes() -> None:
    script = Scripted(replace(DEATH, after=()))
    assert prove(cast(Worker, script), JOB).kind is FailureKind.CRASH


def test_a_worker_knows_who_was_there_before() -> None:
    dies = replace(CLEAN, fault=Fault("abort", "run"))
    with Worker("cpu") as worker:
        assert prove(worker, replace(CLEAN, route=MORTAL + "y")).status is CheckStatus.PASSED
        outcome = worker.run(dies, timeout_s=30.0)
        assert isinstance(outcome, Failed)
        assert outcome.after == (MORTAL + "y",)
        again = worker.run(dies, timeout_s=30.0)  # in a child of its own
        assert isinstance(again, Failed)
        assert again.after == ()
        # which proves it too
        assert prove(worker, replace(CLEAN, route=MORTAL + "y")).status is CheckStatus.PASSED
        assert prove(worker, dies).kind is FailureKind.CRASH


def test_whose_operands_were_left_tells_who_left_them(worker: Worker) -> None:
    assert prove(worker, replace(CLEAN, route=MORTAL + "y")).status is CheckStatus.PASSED
    outcome = worker.run(replace(CLEAN, fault=Fault("hole", "run")), timeout_s=30.0)
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.after) == (FailureKind.ILLEGAL_ACCESS, ())


# --- what is no row is none


@pytest.mark.parametrize("value", [None, 3, {}, {"check": "reference"}, {**PASSED.value, "status": "fine"}])
def test_an_answer_that_is_no_row(value: Any) -> None:
    row = row_of(JOB, Completed(value))
    assert (row.status, row.reason) == (CheckStatus.UNPROVEN, UnprovenReason.INFRASTRUCTURE)
    assert row.detail.startswith("the child answered with what is no row: ")


def test_a_child_stopped_in_the_middle_of_a_message_does_not_stop_its_parent(worker: Worker) -> None:
    start = time.monotonic()
    row = prove(worker, replace(CLEAN, fault=Fault("stall", "answer half")), step_timeout_s=1.0)
    assert row.reason is UnprovenReason.INFRASTRUCTURE
    assert row.detail.startswith("it sent part of a message, then nothing for 1 s")
    assert time.monotonic() - start < 60.0
