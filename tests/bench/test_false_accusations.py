"""``benchmarks/false_accusations.py``: a wrong route is accused at once, and what was not run is told."""

from __future__ import annotations

import pytest

from autotune.checks import registry
from autotune.domain.fingerprint import Facts
from autotune.hardware.memory import GIB
from benchmarks.false_accusations import Subject, columns, job_of, main, task_of

CPU = Facts("cpu", {}, {})


def test_a_check_is_a_task_of_its_own_and_the_far_pool_counts() -> None:
    subject = Subject("fa2", columns("cuda")[1], 0.01)
    facts = Facts("cuda", {"compute_capability": "9.0"}, {"flashinfer": "0.7.2"})
    tasks = {
        check: task_of(job_of(subject, check, facts, 1)) for check in registry.runs(subject.column, "cuda")
    }
    assert all(
        [job.check for _, job in task.jobs] == [check] and task.column == subject.column
        for check, task in tasks.items()
    )
    assert tasks["scattered_pages"].nbytes > 8 * GIB > 4 * tasks["reference"].nbytes


def test_a_wrong_route_is_accused_and_each_check_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--routes", "planted-scale-dropped", "--seeds", "1"]) == 1
    said = capsys.readouterr().out
    at_once, _, tables = said.partition("| route | column |")
    assert "ACCUSED: wrong_output: " in at_once and "autotune prove planted-scale-dropped" in at_once
    # nothing ends at the first failure: every check of the column has its row
    assert "bf16/e4m3 q_len 4 batch 3 | 1 | " in tables
    assert " accusations, 0 not run" in tables.splitlines()[-1]


def test_no_time_is_no_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--routes", "torch-sdpa", "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert "| torch-sdpa | 4/2/64 page 16 bf16/bf16 q_len 1 batch 3 | 0 | 0 | 0 | nan |" in said
    assert said.splitlines()[-1].startswith("0 launches, 0 checks passed in ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--device", "tpu"], "device must be cpu"), (["--device", "cpu", "--routes", "fa9"], "fa9")],
)
def test_a_wrong_flag_is_a_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
