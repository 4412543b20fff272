"""``benchmarks/live_faults.py``: the contract refuses every mistake; rows say what was expected and seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.checks import registry
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.routes import registry as routes
from autotune.routes.planted_live import MISTAKES, PlantedLive
from autotune.sanitizer.examine import Ended, Examined
from autotune.tuner.prover import repro_command
from benchmarks import live_faults
from benchmarks.live_faults import (
    AS_IT_IS,
    CASES,
    COLUMNS,
    Case,
    Rows,
    Seen,
    job_of,
    look,
    main,
    outcome_of,
    refusal,
)

H200 = Facts("cuda", {"compute_capability": "9.0"}, {"flashinfer": "0.7.2"})
RULES = {
    "narrow-table": "table_width (static)",
    "old-lengths": "new_tokens",
    "empty-row": "empty_rows",
    "page-past-the-pool": "table_entries (full)",
    "page-farthest": "table_entries (full)",
    "page-minus-1": "table_entries (full)",
    "page-minus-100000": "table_entries (full)",
    "small-output": "out (static)",
    "dirty-semaphores": "semaphores (full)",
    "strided-query": "dense_query (static)",
    "batch-above-65535": "grid (static)",
}


@pytest.mark.parametrize("device", CASES)
def test_every_mistake_is_refused_by_the_contract(device: str) -> None:
    once = {(case.fault, case.route): case for case in CASES[device]}
    for case in once.values():
        contract, message = refusal(case, COLUMNS[device])
        assert contract.startswith(RULES.get(case.fault, "")) and bool(contract) == bool(message), case
        assert bool(contract) == (case.fault in RULES), case
    # lengths that an engine has on the host are looked at without reading a tensor
    assert refusal(Case("old-lengths", "fa2", "reference"), COLUMNS["cuda"])[0] == "new_tokens (static)"
    assert refusal(Case("old-lengths", "xqa-decode", "reference"), COLUMNS["cuda"])[0] == "new_tokens (full)"


def test_the_cases_can_be_run_on_the_device_that_they_are_for() -> None:
    for case in CASES["cuda"]:
        if case.check:
            route = PlantedLive(case.name) if case.fault in MISTAKES else routes.get(case.route)
            assert route.supports(COLUMNS["cuda"], H200) is None, case
            assert registry.get(case.check).name == case.check
    faults = {case.fault for case in CASES["cuda"]}
    assert faults == set(MISTAKES) | set(AS_IT_IS)
    measured = {(case.fault, case.route) for case in CASES["cuda"] if case.measured}
    assert ("page-minus-1", "xqa-decode") in measured and ("page-minus-1", "fa2") not in measured


def test_a_job_is_one_that_can_be_run_again() -> None:
    case = Case("pad-with-0", "fa2", "padded_rows", pad_value=0)
    job = job_of(case, COLUMNS["cuda"], H200)
    assert job.pad_value == 0 == job.column["pad_value"] and job.route == "fa2"
    assert "--pad-value 0" in repro_command(job)
    assert job_of(Case("old-lengths", "fa2", "reference"), COLUMNS["cuda"], H200).route == (
        "planted-live-old-lengths-in-fa2"
    )


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        (CheckResult("c", 1, CheckStatus.FAILED, 1, kind=FailureKind.NAN_LEAK), "unsafe nan_leak"),
        (CheckResult("c", 1, CheckStatus.PASSED, 1, limits=("logits below 1e4",)), "limit"),
        (CheckResult("c", 1, CheckStatus.PASSED, 1), "safe"),
        (CheckResult("c", 1, CheckStatus.REFUSED, 1), "refused"),
        (CheckResult("c", 1, CheckStatus.NOT_APPLICABLE, 1), "not_applicable"),
        (CheckResult("c", 1, CheckStatus.UNPROVEN, 1, reason=UnprovenReason.BUDGET), "unproven budget"),
    ],
)
def test_outcomes(row: CheckResult, outcome: str) -> None:
    assert outcome_of(row) == outcome


def test_what_is_as_expected() -> None:
    case = Case("old-lengths", "fa2", "reference", ("unsafe wrong_output", "refused"), True)
    seen = {word: Seen(case, word) for word in ("unsafe wrong_output", "unsafe nan_leak", "refused", "safe")}
    assert [each.good for each in seen.values()] == [True, False, True, False]
    assert Seen(Case("old-lengths", "fa2", "reference", ("unsafe",)), "unsafe nan_leak").good
    assert (
        "unsafe wrong_output, refused (measured) | unsafe nan_leak | NO |" in seen["unsafe nan_leak"].line()
    )
    assert not Seen(case, "not run").ran and "| not run |  |" in Seen(case, "not run").line()


def test_rows_of_real_routes_and_of_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    flags = ["--device", "cpu", "--only", "pad-with-0,batch-above-65535,dirty-semaphores"]
    assert main([*flags, "--routes", "torch-splitkv,xqa-decode", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert sorted((row["case"]["fault"], row["outcome"], row["good"]) for row in rows) == [
        ("batch-above-65535", "refused", True),
        ("dirty-semaphores", "refused", True),
        ("pad-with-0", "safe", True),
    ]
    said = capsys.readouterr().out
    assert "3 of 3 cases ran" in said and "0 not as expected: 2 refused, 1 safe" in said
    assert "| semaphores (full) |" in said


def test_a_memory_fault_is_looked_at_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def examined(tool: Path, repro: str, *, timeout_s: float) -> Examined:
        limits.append(timeout_s)
        return Examined(Ended.FAILED, said="a | b")

    monkeypatch.setattr(live_faults, "examine", examined)
    seen = [Seen(Case("small-output", "xqa-decode", "reference"), "unsafe illegal_access") for _ in range(3)]
    for each, left in zip(seen, (999.0, 20.0, 2.0), strict=True):
        look(each, Path("tool"), left)
    assert limits == [live_faults.LOOK_S, 20.0]
    assert [each.sanitizer for each in seen] == [
        "sanitizer: a | b",
        "sanitizer: a | b",
        "sanitizer: no time left",
    ]
    assert "| small-output in xqa-decode | | | | | sanitizer: a / b |" in capsys.readouterr().out


def test_rows_are_written_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = Rows(path)
    for count, outcome in enumerate(("refused", "not run"), 1):
        rows.add(Seen(Case("old-lengths", "fa2", "reference"), outcome))
        assert [row["outcome"] for row in json.loads(path.read_text())] == ["refused", "not run"][:count]


def test_time_that_is_up_leaves_the_rest_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--only", "pad-with-0", "--seconds", "-1"]) == 3
    assert "0 of 2 cases ran" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "cpu", "--only", "nothing"], "no fault is called 'nothing'; there are extreme-logits"),
        (["--device", "cpu", "--routes", "fa2"], "no route is called 'fa2'; there are torch-splitkv"),
        (["--device", "cpu", "--sanitizer"], "--sanitizer: needs a GPU"),
        (["--device", "tpu"], "device must be cpu, cuda or cuda:N"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
