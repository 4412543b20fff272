from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.verdict import FailureKind, UnprovenReason
from autotune.worker import process
from autotune.worker.base import Broken, Channel, Completed, Failed, JobError, Outcome, WorkerError
from autotune.worker.worker import Worker
from tests.worker import death_jobs as jobs


def run(worker: Worker, job: Any, **options: Any) -> Outcome:
    return worker.run(job, **{"timeout_s": 30.0, **options})


def gone(pid: int, within_s: float = 2.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # dead; whoever adopted it has yet to notice
            return True
        time.sleep(0.02)
    return False


FAILURES = [
    (jobs.WildRead(), FailureKind.CRASH, "SIGSEGV"),
    (jobs.HoleAccess(write=False), FailureKind.ILLEGAL_ACCESS, "victim: 0 bytes past the end"),
    (jobs.HoleAccess(write=True), FailureKind.ILLEGAL_ACCESS, "victim: 0 bytes past the end"),
    (jobs.Signal(signal.SIGILL), FailureKind.ILLEGAL_INSTRUCTION, "SIGILL"),
    (jobs.Signal(signal.SIGFPE), FailureKind.CRASH, "SIGFPE"),
    (jobs.AbortWith("corrupted size vs. prev_size\n"), FailureKind.CRASH, "corrupted size"),
    (jobs.Exit(7), FailureKind.CRASH, "exit status 7"),
    (jobs.Exit(0), FailureKind.CRASH, "exit status 0"),
    (
        jobs.Raise("RuntimeError", "CUDA error: an illegal memory access was encountered"),
        FailureKind.ILLEGAL_ACCESS,
        "illegal memory access",
    ),
]


@pytest.mark.parametrize(("job", "kind", "text"), FAILURES, ids=lambda value: str(value)[:40])
def test_a_kernels_death_is_named_and_the_next_job_is_clean(
    worker: Worker, job: Any, kind: FailureKind, text: str
) -> None:
    run(worker, jobs.Add(1, 1))
    before = worker.pid
    outcome = run(worker, job)
    assert isinstance(outcome, Failed), outcome
    assert outcome.kind is kind
    assert text in outcome.detail
    assert outcome.step in ("launch", "one past the end")
    assert outcome.steps == 1
    assert run(worker, jobs.Add(20, 22)) == Completed(42)
    assert worker.pid != before


def test_a_fault_in_a_hole_says_where(worker: Worker) -> None:
    outcome = run(worker, jobs.HoleAccess(write=False))
    assert isinstance(outcome, Failed)
    assert outcome.fault is not None
    assert outcome.fault.inside_hole
    assert (outcome.fault.operand, outcome.fault.offset) == ("victim", 0)
    assert outcome.fault.signal == "SIGSEGV"


def test_a_fault_elsewhere_is_located_too(worker: Worker) -> None:
    outcome = run(worker, jobs.WildRead())
    assert isinstance(outcome, Failed)
    assert outcome.fault is not None
    assert not outcome.fault.inside_hole
    assert outcome.fault.address == 0xDEAD0000


BROKEN = [
    (jobs.Signal(signal.SIGKILL), UnprovenReason.INFRASTRUCTURE, "SIGKILL"),
    (jobs.Signal(signal.SIGTERM), UnprovenReason.INFRASTRUCTURE, "SIGTERM"),
    (jobs.Exit(127), UnprovenReason.INFRASTRUCTURE, "exit status 127"),
    (jobs.Exit(1, says="x.so: undefined symbol: f\n"), UnprovenReason.INFRASTRUCTURE, "undefined symbol"),
    (jobs.AbortWith("what():  std::bad_alloc\n"), UnprovenReason.OUT_OF_MEMORY, "bad_alloc"),
    (jobs.OutOfMemory(), UnprovenReason.OUT_OF_MEMORY, "MemoryError"),
    (jobs.Raise("ImportError", "no module named x"), UnprovenReason.INFRASTRUCTURE, "no module named x"),
    # the same deaths as above, but no kernel was running
    (jobs.WildRead(step=""), UnprovenReason.INFRASTRUCTURE, "outside any launch"),
    (jobs.Exit(7, step=""), UnprovenReason.INFRASTRUCTURE, "outside any launch"),
]


@pytest.mark.parametrize(("job", "reason", "text"), BROKEN, ids=lambda value: str(value)[:40])
def test_our_own_trouble_accuses_nobody(worker: Worker, job: Any, reason: UnprovenReason, text: str) -> None:
    outcome = run(worker, job)
    assert isinstance(outcome, Broken), outcome
    assert outcome.reason is reason
    assert text in outcome.detail
    assert run(worker, jobs.Add(20, 22)) == Completed(42)


def test_a_hang_that_holds_the_gil_is_killed(worker: Worker) -> None:
    start = time.monotonic()
    outcome = run(worker, jobs.HoldGil(), step_timeout_s=0.5)
    assert time.monotonic() - start < 5.0
    assert outcome == Failed(FailureKind.HANG, "no progress for 0.5 s", "launch", steps=1)
    assert run(worker, jobs.Add(1, 2)) == Completed(3)


def test_our_own_code_is_never_a_hang(worker: Worker) -> None:
    outcome = run(worker, jobs.HoldGil(step=""), timeout_s=1.0, step_timeout_s=0.2)
    assert isinstance(outcome, Broken)
    assert outcome.reason is UnprovenReason.BUDGET


def test_progress_within_steps_is_no_hang_but_the_job_has_its_time(worker: Worker) -> None:
    assert run(worker, jobs.SleepInSteps(0.2, 5), step_timeout_s=1.0) == Completed(5)
    outcome = run(worker, jobs.SleepInSteps(0.1, 100), timeout_s=0.6, step_timeout_s=5.0)
    assert isinstance(outcome, Broken)
    assert outcome.reason is UnprovenReason.BUDGET
    assert outcome.step.startswith("nap ")
    assert run(worker, jobs.Add(1, 2)) == Completed(3)


@pytest.mark.parametrize("name", ["RuntimeError", "SystemExit", "KeyboardInterrupt"])
def test_a_python_error_leaves_the_child_alive(worker: Worker, name: str) -> None:
    run(worker, jobs.Add(1, 1))
    before = worker.pid
    outcome = run(worker, jobs.Raise(name, "q has 3 dims, not 4", step=""))
    assert isinstance(outcome, JobError)
    assert outcome.exc_type == name
    assert outcome.message.startswith("q has 3 dims, not 4 (death_jobs.py:")
    assert (outcome.step, outcome.steps) == ("", 0)
    outcome = run(worker, jobs.Raise(name, "q has 3 dims, not 4"))
    detail = f"raised {name}: q has 3 dims, not 4"
    assert outcome == Failed(FailureKind.LAUNCH_ERROR, detail, "launch", steps=1)
    outcome = run(worker, jobs.Raise(name, "q has 3 dims, not 4", step="x: open for 4 rows"))
    assert isinstance(outcome, Broken)
    assert outcome.reason is UnprovenReason.INFRASTRUCTURE
    assert run(worker, jobs.Add(1, 1)) == Completed(2)
    assert worker.pid == before


@pytest.mark.parametrize("end", ["die", "raise", "hang"])
@pytest.mark.parametrize(("turns", "step"), [((0, 1, 0), "even"), ((0, None, 1), "odd")])
def test_of_alternating_steps_the_last_entered_is_to_blame(
    worker: Worker, end: str, turns: tuple[int | None, ...], step: str
) -> None:
    outcome = run(worker, jobs.Alternate(turns, end), step_timeout_s=0.3)
    assert isinstance(outcome, Failed), outcome
    assert outcome.step == step
    assert (
        outcome.kind
        is {
            "die": FailureKind.CRASH,
            "raise": FailureKind.MISALIGNED,
            "hang": FailureKind.HANG,
        }[end]
    )
    assert run(worker, jobs.Add(1, 2)) == Completed(3)


@pytest.mark.parametrize("end", ["die", "raise", "hang"])
@pytest.mark.parametrize("turns", [(), (0, 1, None)])
def test_between_alternating_steps_nobody_is_to_blame(
    worker: Worker, end: str, turns: tuple[int | None, ...]
) -> None:
    outcome = run(worker, jobs.Alternate(turns, end), timeout_s=0.6, step_timeout_s=0.2)
    assert isinstance(outcome, Broken), outcome
    assert outcome.step == ""


def test_too_many_alternating_steps_are_refused(worker: Worker) -> None:
    outcome = run(worker, jobs.Alternate((), "hang", texts=("x",) * 255))
    assert isinstance(outcome, JobError)
    assert "at most 254" in outcome.message


def test_a_garbled_message_accuses_nobody(worker: Worker) -> None:
    outcome = run(worker, jobs.SayNonsense())
    assert isinstance(outcome, Broken)
    assert "cannot be read" in outcome.detail
    assert run(worker, jobs.Add(1, 2)) == Completed(3)


def test_every_row_sent_before_a_crash_arrives(worker: Worker) -> None:
    rows: list[Any] = []
    outcome = run(worker, jobs.EmitThenDie(2000), on_event=rows.append)
    assert isinstance(outcome, Failed)
    assert rows == [{"row": i} for i in range(2000)]
    assert (outcome.step, outcome.steps) == ("row 1999", 2000)


def test_a_slow_parent_holds_the_job_back_without_costing_it_time(worker: Worker) -> None:
    seen: list[int] = []

    def slowly(payload: bytes) -> None:
        seen.append(len(payload))
        time.sleep(0.05)

    outcome = run(worker, jobs.EmitBytes(1 << 20, 40), on_event=slowly, timeout_s=1.5)
    assert outcome == Completed(40)
    assert seen == [1 << 20] * 40


def test_asking_waits_for_the_answer_and_is_not_counted(worker: Worker) -> None:
    def answer(question: Any) -> Any:
        time.sleep(0.8)
        return {"asked": question}

    outcome = run(worker, jobs.Ask(("a", [1], None)), on_event=answer, timeout_s=2.0, step_timeout_s=0.7)
    assert outcome == Completed([{"asked": "a"}, {"asked": [1]}, {"asked": None}])


def test_without_a_listener_asking_gets_none(worker: Worker) -> None:
    assert run(worker, jobs.Ask(("a",))) == Completed([None])


def test_what_cannot_be_pickled_is_a_clear_error(worker: Worker) -> None:
    outcome = run(worker, jobs.Unpicklable())
    assert isinstance(outcome, JobError)
    assert "the value of Unpicklable (function) cannot be pickled" in outcome.message
    assert isinstance(run(worker, jobs.EmitUnpicklable()), JobError)

    @dataclass
    class Local:
        def __call__(self, channel: Channel) -> None: ...

    outcome = run(worker, Local())
    assert isinstance(outcome, JobError)
    assert "Local cannot be pickled" in outcome.message


def test_a_job_that_the_child_cannot_import_is_broken(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_in_the_parent")
    exec("class Ghost:\n    def __call__(self, channel): ...", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_in_the_parent", module)
    outcome = run(worker, module.Ghost())
    assert isinstance(outcome, Broken)
    assert outcome.reason is UnprovenReason.INFRASTRUCTURE
    assert "the job cannot be loaded: No module named 'only_in_the_parent'" in outcome.detail


def test_a_listener_that_raises_ends_the_job_and_the_child(worker: Worker) -> None:
    def refuse(payload: Any) -> None:
        raise OSError("database is locked")

    run(worker, jobs.Add(1, 1))
    pid = worker.pid
    assert pid is not None
    with pytest.raises(OSError, match="database is locked"):
        run(worker, jobs.EmitThenDie(10), on_event=refuse)
    assert gone(pid)
    assert run(worker, jobs.Add(1, 2)) == Completed(3)


def test_run_cannot_be_entered_twice(worker: Worker) -> None:
    def again(payload: Any) -> None:
        run(worker, jobs.Add(1, 1))

    with pytest.raises(RuntimeError, match="already running"):
        run(worker, jobs.Ask(("a",)), on_event=again)


def test_a_child_killed_between_two_jobs_is_replaced(worker: Worker) -> None:
    run(worker, jobs.Add(1, 1))
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert run(worker, jobs.Add(1, 2)) == Completed(3)


def test_a_lost_fork_server_is_replaced_and_accuses_nobody(worker: Worker) -> None:
    def kill_server(child: int) -> None:
        stat = Path(f"/proc/{child}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)

    outcome = run(worker, jobs.EmitPidThenSleep(), on_event=kill_server)
    assert isinstance(outcome, Broken), outcome
    assert outcome.reason is UnprovenReason.INFRASTRUCTURE
    assert run(worker, jobs.Add(1, 2)) == Completed(3)


def test_a_child_that_closes_its_pipe_is_ended(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_REAP_TIMEOUT_S", 0.5)
    outcome = run(worker, jobs.ClosePipe())
    assert outcome == Broken(
        UnprovenReason.INFRASTRUCTURE, "the child closed its pipe and lived on", "launch", steps=1
    )


@pytest.mark.parametrize("how", ["same", "session", "daemon"])
@pytest.mark.parametrize("end", ["die", "hang", "return"])
def test_what_a_job_started_goes_with_it(how: str, end: str, capfd: pytest.CaptureFixture[str]) -> None:
    with Worker("cpu") as other, Worker("cpu") as worker:
        others: list[int] = []
        run(other, jobs.StartGrandchild("return", how), on_event=others.append)
        pids: list[int] = []
        outcome = run(worker, jobs.StartGrandchild(end, how), on_event=pids.append, step_timeout_s=0.5)
        assert isinstance(outcome, Completed if end == "return" else Failed)
        worker.close()
        assert len(pids) == len(others) == (1 if how == "daemon" else 2)
        assert all(gone(pid) for pid in pids)
        assert not any(gone(pid, 0.05) for pid in others)
    assert all(gone(pid) for pid in others)
    assert capfd.readouterr() == ("", "")


def test_the_child_from_inside(worker: Worker) -> None:
    outcome = run(worker, jobs.Inspect())
    assert isinstance(outcome, Completed)
    seen = outcome.value
    assert seen["pid"] == seen["session"] == worker.pid
    assert seen["core"] == 0
    assert seen["threads"] == 1
    assert seen["sigint"]
    assert seen["main"] is None


def test_output_goes_into_the_detail_of_its_own_job_only(
    worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    run(worker, jobs.Exit(3, says="assertion `x > 0` failed\n"))
    outcome = run(worker, jobs.Exit(3))
    assert isinstance(outcome, Failed)
    assert "assertion" not in outcome.detail
    assert capfd.readouterr() == ("", "")


def test_crashes_leak_nothing(worker: Worker) -> None:
    def open_fds() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    run(worker, jobs.WildRead())
    before, pids = open_fds(), set[int]()
    for _ in range(200):
        assert isinstance(run(worker, jobs.EmitPidThenDie(), on_event=pids.add), Failed)
    assert open_fds() == before
    assert len(pids) == 200
    assert all(gone(pid) for pid in pids)


def test_close_ends_the_child_and_is_final() -> None:
    with Worker("cpu") as worker:
        run(worker, jobs.Add(1, 1))
        pid = worker.pid
    assert pid is not None
    assert gone(pid)
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        run(worker, jobs.Add(1, 1))


def test_two_workers_do_not_disturb_each_other(worker: Worker) -> None:
    with Worker("cpu") as other:
        assert run(other, jobs.Add(1, 1)) == Completed(2)
        run(worker, jobs.WildRead())
        assert run(worker, jobs.Add(2, 2)) == Completed(4)
        pid = other.pid
        assert run(other, jobs.Add(3, 3)) == Completed(6)
        assert other.pid == pid


def test_a_worker_belongs_to_the_main_thread() -> None:
    caught: list[Exception] = []

    def make() -> None:
        try:
            Worker("cpu")
        except WorkerError as error:
            caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
