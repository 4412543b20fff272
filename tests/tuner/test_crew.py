"""Children that prove at once: scripted ones for the order of things, real ones for the rows."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from autotune.domain.cell import Cell, Column
from autotune.domain.verdict import CheckStatus, UnprovenReason
from autotune.hardware.collect import collect
from autotune.routes import registry as route_registry
from autotune.routes.base import Route
from autotune.space.engine import load_engine
from autotune.space.grid import expand
from autotune.space.space import load_file
from autotune.store.errors import StoreError
from autotune.tuner.book import ROW_CHECK
from autotune.tuner.crew import Crew, Row, Task
from autotune.tuner.deadline import Deadline
from autotune.tuner.listener import Silent
from autotune.tuner.prover import Prover
from autotune.tuner.run import OpenedRun
from autotune.tuner.target import Target
from autotune.worker.base import Broken, Completed, Outcome, WorkerError
from autotune.worker.jobs import ProveJob
from autotune.worker.worker import Worker
from tests.console import SINGLE
from tests.tuner.scripted import (
    FACTS,
    ScriptedWorker,
    failed,
    opened,
    routes,
    row,
    sweep_with,
    target,
    unproven,
)

COLUMNS = target().grid.columns
CELLS = [item.cell for item in target().grid.cells if item.cell.column == COLUMNS[0]]
ROUTE = routes("fast")["fast"]


def job(check: str, column: Column = COLUMNS[0], route: str = "fast") -> ProveJob:
    return ProveJob(route, check, column.to_dict(), FACTS.to_dict(), (64,), 1, "cpu", "host_mmap")


def task(*checks: str, cells: tuple[Cell, ...] = (), column: Column = COLUMNS[0], nbytes: int = 0) -> Task:
    jobs: list[tuple[Column | Cell, ProveJob]] = [(column, job(check, column)) for check in checks]
    return Task(ROUTE, column, (*jobs, *((cell, job(ROW_CHECK)) for cell in cells)), nbytes)


def crew(*workers: object, memory: int | None = None) -> Crew:
    return Crew([cast(Worker, worker) for worker in workers], memory)


def never() -> bool:
    return False


def checks_of(rows: Iterator[Row] | list[Row]) -> list[str]:
    return [each.job.check for each in rows]


class Waiting(ScriptedWorker):
    """A child of its own (one that does nothing), and jobs that last until it is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        self.pid = self.child.pid
        self.began = threading.Event()

    def run(self, job: object, **options: object) -> Outcome:
        self.began.set()
        status = self.child.wait(timeout=30)
        return Broken(UnprovenReason.INFRASTRUCTURE, f"ended by {-status}", "fast: launch")


def assert_no_threads(before: int) -> None:
    assert threading.active_count() == before


def test_jobs_of_a_task_run_in_order_then_its_cells() -> None:
    worker = ScriptedWorker()
    rows = list(crew(worker).run([task("reference", "nan_pool", cells=tuple(CELLS))], never))
    assert checks_of(rows) == ["reference", "nan_pool", ROW_CHECK, ROW_CHECK]
    assert [each.target for each in rows] == [COLUMNS[0], COLUMNS[0], *CELLS]
    assert [check for _, check in worker.proved] == checks_of(rows)


def test_tasks_start_in_order() -> None:
    worker = ScriptedWorker()
    tasks = [task("reference"), task("nan_pool"), task("scales")]
    assert checks_of(crew(worker).run(tasks, never)) == ["reference", "nan_pool", "scales"]
    assert list(crew(worker).run([], never)) == []


def test_the_first_failure_ends_a_task_and_no_other() -> None:
    worker = ScriptedWorker({("fast", "nan_pool"): failed()})
    tasks = [task("reference", "nan_pool", "scales", cells=tuple(CELLS)), task("repeats")]
    rows = list(crew(worker).run(tasks, never))
    assert checks_of(rows) == ["reference", "nan_pool", "repeats"]
    assert rows[1].result.status is CheckStatus.FAILED


def test_a_cells_launch_waits_for_the_whole_column() -> None:
    worker = ScriptedWorker({("fast", "nan_pool"): unproven})
    rows = crew(worker).run([task("reference", "nan_pool", "scales", cells=tuple(CELLS))], never)
    # the checks after one that says nothing are run nevertheless
    assert checks_of(rows) == ["reference", "nan_pool", "scales"]


def test_a_cells_launch_does_not_wait_for_a_check_that_only_states_limits() -> None:
    worker = ScriptedWorker({("fast", "extreme_logits"): unproven})
    wanted = task("reference", "extreme_logits", cells=(CELLS[0],))
    assert checks_of(crew(worker).run([wanted], never)) == [wanted_job.check for _, wanted_job in wanted.jobs]


def test_as_many_at_once_as_there_are_workers() -> None:
    meeting = threading.Barrier(2, timeout=10)

    def meet(job: ProveJob) -> Outcome:
        meeting.wait()
        return Completed(row(job, CheckStatus.PASSED).to_dict())

    workers = [ScriptedWorker({("fast", "reference"): meet}) for _ in range(2)]
    before = threading.active_count()
    rows = list(crew(*workers).run([task("reference")] * 2, never))
    assert len(rows) == 2
    assert [len(worker.proved) for worker in workers] == [1, 1]
    assert_no_threads(before)


def test_tasks_that_do_not_fit_together_wait_and_one_that_never_fits_runs_alone() -> None:
    lock = threading.Lock()
    running: list[int] = []
    most: list[int] = []

    def measure(nbytes: int) -> Callable[[ProveJob], Outcome]:
        def run(job: ProveJob) -> Outcome:
            with lock:
                running.append(nbytes)
                most.append(sum(running))
                together.append(len(running))
            time.sleep(0.02)
            with lock:
                running.remove(nbytes)
            return Completed(row(job, CheckStatus.PASSED).to_dict())

        return run

    sizes = {"reference": 40, "nan_pool": 60, "scales": 500, "repeats": 50, "strides": 60}
    script = {("fast", check): measure(nbytes) for check, nbytes in sizes.items()}
    together: list[int] = []
    tasks = [task(check, nbytes=nbytes) for check, nbytes in sizes.items()] * 3
    workers = [ScriptedWorker(script) for _ in range(3)]
    rows = list(crew(*workers, memory=100).run(tasks, never))
    assert len(rows) == len(tasks)
    assert max(seen for seen in most if seen < 500) <= 100
    # the one that is too large for the limit ran, and beside nothing
    assert [seen for seen in most if seen >= 500] == [500] * 3
    assert max(together) <= 2


@pytest.mark.parametrize("error", [StoreError("disk full"), KeyboardInterrupt()])
def test_an_error_of_the_reader_kills_the_children_and_records_nothing_more(
    error: BaseException, tmp_path: Path
) -> None:
    before = threading.active_count()
    waiting, quick = Waiting(), ScriptedWorker()
    known = routes("fast")
    with opened(tmp_path, known) as run:

        def fail(*_: object) -> None:
            assert waiting.began.wait(10)
            raise error

        listener = Silent()
        listener.proof = fail  # type: ignore[assignment, method-assign]
        prover = Prover(crew(waiting, quick), run.target, run.book, listener, Deadline(None))
        lens = dict.fromkeys(COLUMNS, (64, 128))
        started = time.monotonic()
        with pytest.raises(type(error)):
            prover.prove([(known["fast"], column, ()) for column in COLUMNS], lens)
        assert time.monotonic() - started < 20
        assert waiting.child.returncode == -signal.SIGKILL
        assert_no_threads(before)
        # one row was stored before the error; the killed child's says nothing and is not there
        rows = run.repository.all_proofs(run.fingerprint)
        assert [proof.result.status for proof in rows] == [CheckStatus.PASSED]


def test_a_child_that_was_just_starting_is_killed_too() -> None:
    waiting, quick = Waiting(), ScriptedWorker()
    pid, waiting.pid = waiting.pid, None
    rows = crew(waiting, quick).run([task("reference")] * 2, never)
    next(rows)
    assert waiting.began.wait(10)
    threading.Timer(0.3, lambda: setattr(waiting, "pid", pid)).start()
    rows.close()
    assert waiting.child.returncode == -signal.SIGKILL


def test_a_stop_is_asked_before_each_job() -> None:
    worker = ScriptedWorker()
    rows: list[Row] = []
    for each in crew(worker).run([task("reference", "nan_pool", "scales")], lambda: len(rows) >= 2):
        rows.append(each)
        time.sleep(0.05)
    assert 2 <= len(rows) < 4
    worker = ScriptedWorker()
    assert list(crew(worker).run([task("reference")], lambda: True)) == []
    assert worker.proved == []


def test_what_a_stop_left_unproven_is_not_recorded() -> None:
    stopped = threading.Event()

    def late(job: ProveJob) -> Outcome:
        stopped.set()
        return unproven(job)

    worker = ScriptedWorker({("fast", "nan_pool"): late})
    rows = crew(worker).run([task("reference", "nan_pool", "scales")], stopped.is_set)
    assert checks_of(rows) == ["reference"]


def test_a_worker_that_has_no_child_surfaces() -> None:
    class Childless(ScriptedWorker):
        def run(self, job: object, **options: object) -> Outcome:
            raise WorkerError("the child process cannot be started: no processes left")

    before = threading.active_count()
    with pytest.raises(WorkerError, match="no processes left"):
        list(crew(Childless(), ScriptedWorker()).run([task("reference")] * 4, never))
    assert_no_threads(before)


def test_rows_are_stored_by_the_callers_thread_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(2)
    met = threading.local()

    def meet(job: ProveJob) -> Outcome:
        if job.kv_lens == (64, 128) and not hasattr(met, "once"):  # of the column, not of a cell
            met.once = True
            meeting.wait(10)
        return Completed(row(job, CheckStatus.PASSED, worst_error=0.1).to_dict())

    with opened(tmp_path, routes("fast")) as run:
        threads = set()
        save = run.repository.save_proof

        def saved(*args: object, **more: object) -> None:
            threads.add(threading.current_thread())
            save(*args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(run.repository, "save_proof", saved)
        workers = [ScriptedWorker({("torch-sdpa", "reference"): meet}) for _ in range(2)]
        assert sweep_with(run, workers).settled == 4
        assert threads == {threading.main_thread()}
        # both worked, and what was proven is what one alone would have proven
        assert all(worker.proved for worker in workers)
    with opened(tmp_path / "alone", routes("fast")) as run:
        alone = ScriptedWorker()
        sweep_with(run, [alone])
    assert sorted(workers[0].proved + workers[1].proved) == sorted(alone.proved)


def test_a_deadline_leaves_the_rest_for_the_next_call(tmp_path: Path) -> None:
    def slow(job: ProveJob) -> Outcome:
        time.sleep(0.6)
        return Completed(row(job, CheckStatus.PASSED, worst_error=0.1).to_dict())

    with opened(tmp_path, routes("fast")) as run:
        first = [ScriptedWorker({("torch-sdpa", "reference"): slow}) for _ in range(2)]
        progress = sweep_with(run, first, seconds=0.4)
        assert progress.out_of_budget
        assert progress.settled == 0
        stored = run.repository.all_proofs(run.fingerprint)
        assert stored
        assert all(proof.result.status is CheckStatus.PASSED for proof in stored)
        second = [ScriptedWorker(), ScriptedWorker()]
        assert sweep_with(run, second).settled == 4
        # nothing of the first call is run again: two routes' checks in two columns, and four cells' rows
        again = sum(len(worker.proved) for worker in second)
        assert again + len(stored) == len(run.repository.all_proofs(run.fingerprint))


def proven(folder: Path, count: int) -> set[tuple[object, ...]]:
    """All proofs of one cell and its column on this CPU by ``count`` real children."""
    facts = collect("cpu")
    place = Target(expand(load_file(SINGLE), load_engine("generic")), facts, "cpu", "host_mmap", seed=11)
    known: dict[str, Route] = route_registry.routes("cpu")
    with opened(folder, known, place) as run, ExitStack() as stack:
        workers = [stack.enter_context(Worker("cpu")) for _ in range(count)]
        prover = Prover(Crew(workers), place, run.book, Silent(), Deadline(None))
        wanted = [
            (route, column, [item.cell for item in run.cells if item.cell.column == column])
            for column in place.grid.columns
            for route in known.values()
        ]
        prover.prove(wanted, dict.fromkeys(place.grid.columns, (128,)))
        return _rows(run)


def _rows(run: OpenedRun) -> set[tuple[object, ...]]:
    return {
        (
            proof.column.id,
            proof.cell_id,
            proof.route,
            proof.repro,
            *sorted(
                (key, str(value)) for key, value in proof.result.to_dict().items() if key != "worst_error"
            ),
            round(proof.result.worst_error or 0.0, 9),
        )
        for proof in run.repository.all_proofs(run.fingerprint)
    }


def test_two_children_prove_what_one_proves(tmp_path: Path) -> None:
    one, two = proven(tmp_path / "one", 1), proven(tmp_path / "two", 2)
    assert len(one) > 20
    assert one == two
