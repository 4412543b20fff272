"""The map of known faults (``catalogue.yaml``): its rows, and whether what they point to is there."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from autotune.checks.controls import BY_DEVICE
from autotune.routes.contract import RULES

FILE = Path(__file__).with_name("catalogue.yaml")
TESTS = Path(__file__).resolve().parents[1]
# Entries of the survey that the map is about; one that is left out would look like one that never was.
ENTRIES = 133


class Status(str, Enum):
    """What stands for a fault; see the head of ``catalogue.yaml``."""

    LIVE = "live"
    PLANTED = "planted"
    RULE = "rule"
    UNIT = "unit"
    NOT_REACHABLE = "not_reachable"


# kind -> what it means, in the order of the page
KINDS = {
    "metadata": "the call is described wrongly: lengths, page table, pool, plan",
    "numerics": "wrong numbers at some shape, tile or mask, without an error",
    "out_of_bounds": "memory outside an operand is read or written",
    "overflow": "an index or a grid is too narrow",
    "workspace": "state that outlives a call",
    "graph": "what a captured graph keeps",
    "padding": "NaN where nobody should look",
    "empty_rows": "rows without visible tokens",
    "strides": "views that are not dense",
    "features": "scales, windows, caps and sentinels",
    "hang": "a launch that does not end",
    "race": "right and wrong in turn",
    "unsupported": "no kernel for the shape",
    "speed": "the slower kernel is called",
    "device": "another device than the operands'",
    "tuner_process": "a tuner that its candidates take down",
    "tuner_key": "a stored answer for another call",
    "tuner_lookup": "an answer that is stretched",
    "ranks": "ranks that disagree",
    "measurement": "what was timed is not what runs",
    "identity": "one machine taken for another",
}


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        seen: public issues or pull requests.
        planted, rules, tests: what stands for it, the nearest first; tests as node ids below ``tests/``.
        why: why nothing can, for ``not_reachable``.
    """

    id: int
    seen: str
    kind: str
    fault: str
    status: Status
    planted: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    why: str = ""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Fault:
        """Strict: an unknown key is a ``TypeError``, an unknown status a ``ValueError``."""
        lists = {name: tuple(row.get(name, ())) for name in ("planted", "rules", "tests")}
        return cls(**{**row, **lists, "status": Status(row["status"])})


@cache
def _document() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def faults() -> tuple[Fault, ...]:
    """All rows in order."""
    return tuple(Fault.of(row) for row in _document()["faults"])


def checks() -> dict[str, str]:
    """Check -> what it is for."""
    return {row["name"]: row["for"] for row in _document()["checks"]}


def controls() -> dict[str, str]:
    """Planted fault -> the check that it is shown to, on any device."""
    every = [control for controls in BY_DEVICE.values() for control in controls]
    return {control.route.name: control.check for control in every}


@cache
def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def missing(fault: Fault) -> list[str]:
    """What a row points to that is not there, in words."""
    rules, planted = {rule.name for rule in RULES}, controls()
    found = [f"no planted fault is called {name}" for name in fault.planted if name not in planted]
    found += [f"no rule is called {name}" for name in fault.rules if name not in rules]
    for node in fault.tests:
        path, _, name = node.partition("::")
        file = TESTS / path
        if not file.is_file():
            found.append(f"no file tests/{path}")
        elif not (last := name.rpartition("::")[2]).startswith("test_") or last not in _functions(file):
            found.append(f"tests/{path} has no test {name}")
    return found


def contradictions(fault: Fault) -> list[str]:
    """Where a row's status is not borne out by what it points to, in words."""
    first = {
        Status.LIVE: fault.planted,
        Status.PLANTED: fault.planted,
        Status.RULE: fault.rules,
        Status.UNIT: fault.tests,
        Status.NOT_REACHABLE: (fault.why,) if fault.why else (),
    }[fault.status]
    found = [] if first else [f"{fault.status.value} without anything that makes it so"]
    if fault.kind not in KINDS:
        found.append(f"kind {fault.kind} is unknown")
    if fault.why and fault.status is not Status.NOT_REACHABLE:
        found.append("a reason why not, and yet something stands for it")
    if not fault.fault or not fault.seen:
        found.append("no description, or no public source")
    return found


def counts() -> dict[Status, int]:
    """Rows by status."""
    tally = Counter(fault.status for fault in faults())
    return {status: tally[status] for status in Status}
