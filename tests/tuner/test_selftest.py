from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.checks import registry
from autotune.checks.controls import CONTROLS, INTERVAL
from autotune.hardware.collect import collect
from autotune.tuner.selftest import ControlResult, SelfTest, run_selftest
from autotune.worker.worker import Worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cpu") as worker:
        yield worker


@pytest.fixture(scope="module")
def whole(worker: Worker) -> tuple[SelfTest, list[ControlResult]]:
    told: list[ControlResult] = []
    return run_selftest(worker, "cpu", facts=collect("cpu"), on_result=told.append), told


def test_every_planted_fault_is_detected_and_no_clean_kernel_accused(
    whole: tuple[SelfTest, list[ControlResult]],
) -> None:
    test, told = whole
    assert test.ok, test.failures
    assert tuple(told) == test.results
    planted = [result for result in test.results if result.expected != "safe"]
    assert [(result.control, result.check) for result in planted] == [
        (control.name, control.check) for control in CONTROLS
    ]
    assert all(result.detected and result.got == result.expected for result in planted)
    clean = [result for result in test.results if result.expected == "safe"]
    assert {result.check for result in clean} == set(registry.runs(INTERVAL, "cpu"))
    assert all(result.got == "safe" and not result.detected for result in clean)


def test_real_deaths_are_among_the_controls(whole: tuple[SelfTest, list[ControlResult]]) -> None:
    details = {result.expected: result.detail for result in whole[0].results}
    assert "SIGSEGV" in details["illegal_access"]
    assert "past the end" in details["illegal_access"] or "before the start" in details["illegal_access"]
    assert details["hang"].startswith("no progress for 2 s")
    assert "crash" in details


def test_a_row_as_printed(whole: tuple[SelfTest, list[ControlResult]]) -> None:
    row = whole[0].results[0].to_dict()
    assert (row["expected"], row["got"], row["detected"]) == ("safe", "safe", False)
    assert set(row) == {"control", "check", "expected", "got", "detected", "detail"}


@pytest.mark.parametrize("check", registry.runs(INTERVAL, "cpu"))
def test_a_skipped_check_leaves_its_controls_undetected(worker: Worker, check: str) -> None:
    test = run_selftest(worker, "cpu", only=check, skip={check}, facts=collect("cpu"))
    assert not test.ok
    assert test.results
    assert all(result.check == check for result in test.results)
    assert all(result.got == "skipped" and not result.detected for result in test.results)


def test_only_runs_one_checks_controls(worker: Worker) -> None:
    test = run_selftest(worker, "cpu", only="padded_rows")
    assert test.ok
    assert {result.check for result in test.results} == {"padded_rows"}
    assert test.results[0].expected == "safe"


@pytest.mark.parametrize("options", [{"only": "nonsense"}, {"skip": frozenset({"nonsense"})}])
def test_an_unknown_check_lists_those_there_are(worker: Worker, options: dict[str, str]) -> None:
    with pytest.raises(registry.UnknownCheckError, match=r"'nonsense'.*reference.*strides"):
        run_selftest(worker, "cpu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("expected", "got", "ok"),
    [
        ("safe", "safe", True),
        ("safe", "wrong_output", False),
        ("safe", "out_of_memory", False),
        ("safe", "not_applicable", False),
        ("hang", "hang", True),
        ("hang", "crash", False),
        ("hang", "safe", False),
        ("hang", "skipped", False),
        ("hang", "infrastructure", False),
    ],
)
def test_what_stops_a_run(expected: str, got: str, ok: bool) -> None:
    good = ControlResult("planted-x", "reference", "crash", "crash", True)
    result = ControlResult("planted-y", "reference", expected, got, expected == got != "safe")
    test = SelfTest((good, result))
    assert test.ok is ok
    assert test.failures == (() if ok else (result,))


def test_nothing_shown_proves_nothing() -> None:
    assert not SelfTest(()).ok
    assert not SelfTest((ControlResult("planted-clean", "reference", "safe", "safe", False),)).ok
