"""The map of known faults points at things that are there, and the page says what the map says."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from autotune.checks import registry
from autotune.routes.contract import RULES
from tests.faults import catalogue
from tests.faults.catalogue import ENTRIES, KINDS, TESTS, Fault, Status, contradictions, faults, missing

ROOT = TESTS.parent
PAGE = ROOT / "docs" / "safety.md"
ROW = faults()[0]


def test_no_entry_is_left_out() -> None:
    assert [fault.id for fault in faults()] == list(range(1, ENTRIES + 1))


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.id}-{fault.kind}")
def test_every_pointer_is_followed(fault: Fault) -> None:
    assert missing(fault) == []
    assert contradictions(fault) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (replace(ROW, planted=("planted-nothing",)), "no planted fault is called planted-nothing"),
        (replace(ROW, rules=("no_such_rule",)), "no rule is called no_such_rule"),
        (replace(ROW, tests=("no/test_file.py::test_x",)), "no file tests/no/test_file.py"),
        (
            replace(ROW, tests=("faults/test_catalogue.py::test_y",)),
            "tests/faults/test_catalogue.py has no test test_y",
        ),
        (
            replace(ROW, tests=("faults/catalogue.py::faults",)),
            "tests/faults/catalogue.py has no test faults",
        ),
        (replace(ROW, planted=("planted-clean",)), "no planted fault is called planted-clean"),
    ],
)
def test_a_pointer_to_nothing_is_found(row: Fault, said: str) -> None:
    assert missing(row) == [said]


@pytest.mark.parametrize(
    "row",
    [
        replace(ROW, planted=()),
        replace(ROW, status=Status.RULE, rules=()),
        replace(ROW, status=Status.UNIT),
        replace(ROW, status=Status.NOT_REACHABLE),
        replace(ROW, why="it cannot be"),
        replace(ROW, kind="bad luck"),
        replace(ROW, seen=""),
    ],
)
def test_a_status_that_nothing_bears_out_is_found(row: Fault) -> None:
    assert len(contradictions(row)) == 1


def test_live_is_what_the_self_test_shows_on_the_real_kernel() -> None:
    assert [fault.planted[0] for fault in faults() if fault.status is Status.LIVE] == [
        "planted-xqa-narrow-table"
    ]


def test_sources_are_public_references() -> None:
    for fault in faults():
        assert re.fullmatch(r"[\w./-]+( #\d+)+(; [\w./-]+( #\d+)+)*", fault.seen), fault.seen


def test_every_kind_has_a_fault_and_every_rule_of_lengths_too() -> None:
    assert {fault.kind for fault in faults()} == set(KINDS)
    used = {name for fault in faults() for name in fault.rules}
    # shapes of single operands, and what libraries are asked for: no public fault is only about them
    assert {rule.name for rule in RULES} - used <= {"host_scales", "sinks", "out", "block_scales"}


def test_the_sixteen_checks_are_told_in_running_order() -> None:
    told = list(catalogue.checks())
    assert len(told) == 16 and told[-1] == "sanitizer"
    assert [name for name in told if name in registry.names()] == list(registry.names())


def test_the_page_is_what_the_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/safety_doc.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_the_maps_counts() -> None:
    text = PAGE.read_text()
    for status, count in catalogue.counts().items():
        assert f"| `{status.value}` | {count} |" in text
    assert f"\n{ENTRIES} faults that" in text
