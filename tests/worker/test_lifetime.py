"""Whole processes: what is left when the parent ends, one way or another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, time
{imports}
from autotune.worker.base import WorkerError
from autotune.worker.worker import Worker
from tests.worker import death_jobs as jobs

if __name__ == "__main__":
    {before}
    try:
        worker = Worker("cpu")
        print("made", flush=True)
        {body}
    except WorkerError as error:
        print("WorkerError:", error, flush=True)
    except KeyboardInterrupt:
        print("interrupted", worker.pid, flush=True)
        sys.exit(130)
"""

HANG = """print(worker.run(jobs.Add(1, 1), timeout_s=60), flush=True)
        worker.run(jobs.HoldGil(), timeout_s=60)"""


def start(
    tmp_path: Path, body: str, imports: str = "", before: str = "pass", **environment: str
) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(body=body, imports=imports, before=before))
    return subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=tmp_path,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}")


def descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= frontier
    return found


def alive(pids: set[int]) -> set[int]:
    living = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            living.add(pid)
    return living


def assert_gone(pids: set[int], within_s: float = 2.0) -> None:
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pids)


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    process = start(tmp_path, HANG)
    wait_for(process, "Completed(value=2)")
    time.sleep(0.3)
    # fork server, resource tracker, child
    family = descendants(process.pid)
    assert len(family) == 3
    process.kill()
    process.wait()
    assert_gone(family)


def test_nothing_outlives_a_parent_killed_while_the_fork_server_starts(tmp_path: Path) -> None:
    process = start(tmp_path, HANG)
    wait_for(process, "made")
    family = descendants(process.pid)
    assert len(family) == 2
    process.kill()
    process.wait()
    assert_gone(family)


def test_ctrl_c_is_the_parents_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, HANG)
    wait_for(process, "Completed(value=2)")
    time.sleep(0.3)
    family = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert output == "interrupted None\n"
    assert process.returncode == 130
    assert_gone(family)


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3])
def test_ctrl_c_while_the_fork_server_starts(tmp_path: Path, after_s: float) -> None:
    process = start(tmp_path, HANG)
    wait_for(process, "made")
    time.sleep(after_s)
    family = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert output == "interrupted None\n"
    assert process.returncode == 130
    assert_gone(family)


def test_a_worker_left_open_ends_with_the_program(tmp_path: Path) -> None:
    process = start(tmp_path, "print(worker.run(jobs.Add(1, 1), timeout_s=60), flush=True); time.sleep(0.5)")
    wait_for(process, "Completed(value=2)")
    family = descendants(process.pid)
    assert len(family) == 3
    assert process.wait(timeout=10) == 0
    assert_gone(family)


def test_children_do_not_import_the_main_program_again(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "print(worker.run(jobs.Inspect(), timeout_s=60).value['modules'], flush=True)",
        imports="import optuna, sqlalchemy, typer",
    )
    output, _ = process.communicate(timeout=60)
    assert output == "made\n[]\n"


def test_a_foreign_fork_server_is_refused(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "worker.run(jobs.Add(1, 1), timeout_s=60)",
        imports="import multiprocessing",
        before="multiprocessing.get_context('forkserver').Process(target=time.sleep, args=(0,)).start()",
    )
    output, _ = process.communicate(timeout=60)
    assert "WorkerError: the fork server could not preload" in output
