"""``autotune selftest``."""

from __future__ import annotations

from functools import cache

import pytest

from autotune.checks import registry
from tests.console import Result, cli


@cache
def shown_to(check: str) -> Result:
    """One check's controls, shown once for all tests."""
    return cli("selftest", "--only", check, "--json")


# Every check's controls are shown in tests/tuner; here, what the command makes of them.
@pytest.mark.parametrize("check", ["reference", "padded_rows"])
def test_only_one_check_and_that_one_skipped(check: str) -> None:
    shown = shown_to(check)
    assert shown.code == 0, shown.err
    rows = shown.json
    assert {row["check"] for row in rows} == {check}
    faults = [row for row in rows if row["expected"] != "safe"]
    assert faults
    assert all(row["detected"] is True and row["got"] == row["expected"] for row in faults)
    assert all(row["got"] == "safe" and row["detected"] is False for row in rows if row["expected"] == "safe")

    skipped = cli("selftest", "--gpu", "cpu", "--only", check, "--skip-check", check, "--json")
    assert skipped.code == 4
    assert skipped.json
    assert all(row["check"] == check and row["detected"] is False for row in skipped.json)
    assert {row["control"] for row in skipped.json} == {row["control"] for row in faults}


def test_real_deaths_are_among_the_controls() -> None:
    rows = shown_to("reference").json
    assert set(rows[0]) >= {"control", "check", "expected", "got", "detected"}
    details = {row["expected"]: row["detail"] for row in rows}
    assert "SIGSEGV" in details["illegal_access"]
    assert details["hang"].startswith("no progress for")
    assert {"crash", "launch_error", "out_of_bounds_write", "wrong_output"} <= set(details)


def test_for_people() -> None:
    result = cli("selftest", "--only", "padded_rows")
    assert result.code == 0
    assert "planted-pad-nan" in result.out
    assert "3 of 3 planted faults detected" in result.out
    assert "\x1b" not in result.out
    assert result.err.splitlines() == ["self-test: 4 controls", "self-test: passed"]


def test_a_missed_fault_is_said() -> None:
    result = cli("selftest", "--only", "strides", "--skip-check", "strides")
    assert result.code == 4
    assert "FAILED" in result.out
    assert "0 of 2 planted faults detected" in result.out
    assert "self-test: FAILED" in result.err


@pytest.mark.parametrize("flag", ["--only", "--skip-check"])
def test_an_unknown_check(flag: str) -> None:
    result = cli("selftest", flag, "nonsense")
    assert result.code == 2
    assert "'nonsense'" in result.line
    assert all(name in result.line for name in registry.names())


def test_another_machine() -> None:
    result = cli("selftest", "--gpu", "b200")
    assert result.code == 3
    assert "NVIDIA B200" in result.line
