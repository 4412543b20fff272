"""Children that die in the middle of a run: real children, a real database, the tiny space's four cells.

One fault strikes one route in one check or race. Whatever it is, the rows of before stand, no other route or
cell is marked, and the next call goes on to the end.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from autotune.bench.eprocess import SignTest
from autotune.bench.record import MIN_GROUP_MS, RoundSettings
from autotune.checks import catalogue
from autotune.domain.cell import Cell, Column
from autotune.domain.verdict import CheckStatus, FailureKind, Status
from autotune.hardware.collect import collect
from autotune.routes import registry as route_registry
from autotune.routes.base import Route
from autotune.tuner import prover, racer
from autotune.tuner import run as run_module
from autotune.tuner.book import ROW_CHECK, TIMING
from autotune.tuner.crew import Crew
from autotune.tuner.deadline import Deadline
from autotune.tuner.listener import Silent
from autotune.tuner.run import OpenedRun
from autotune.tuner.target import Target
from autotune.tuner.tuner import Progress, Tuner
from autotune.worker import process
from autotune.worker.worker import Worker
from tests.tuner.scripted import opened, target
from tests.worker.deaths import (
    FULL,
    MORTAL,
    PROVE_STEPS,
    TIME_STEPS,
    Fault,
    MortalProve,
    MortalRoute,
    MortalTime,
    expected,
)
from tests.worker.test_lifetime import assert_gone, descendants

X = MORTAL + "x"
CHECKS = ("reference", "position_coded", "nan_pool")
# Room for a busy machine to get from one step to the next; a hang costs it once.
STEP_TIMEOUT_S = 4.0
ROUNDS = 16
CELLS = 4


@dataclass
class Order:
    """Strikes once: in a check of the first column that comes to it, or of the first cell, or in its race."""

    fault: Fault
    check: str
    struck: list[Column | Cell] = field(default_factory=list)

    def prove(self, **fields: Any) -> MortalProve:
        """A proof's job, with the fault inside if it is the one."""
        mine = fields["route"] == X and fields["check"] == self.check.partition("@")[0] and not self.struck
        if mine and "@" in self.check:  # the launch of a cell, which is made at the cell's own ends
            mine = fields["kv_lens"] != ALL_LENS
        if mine:
            self.struck.append(Column.from_dict(fields["column"]))
        return MortalProve(**fields, fault=self.fault if mine else None)

    def time(self, **fields: Any) -> MortalTime:
        """A race's job, with the fault inside if it is the one."""
        mine = self.check == TIMING and X in fields["routes"] and not self.struck
        if mine:
            self.struck.append(Cell.from_dict(fields["cell"]))
        return MortalTime(**fields, fault=self.fault if mine else None)

    @property
    def column(self) -> Column:
        """Where it struck."""
        (where,) = self.struck
        return where.column if isinstance(where, Cell) else where


ALL_LENS = (64, 128)
FAULTS = [
    ("position_coded", Fault("hole", "run", nth=2, orphan="session")),
    (f"{ROW_CHECK}@", Fault("kill", "prepare", orphan="same")),
    (TIMING, Fault("wild", "run", reports=1, orphan="session")),
    (TIMING, Fault("abort", "told", orphan="same")),
]
MORE_FAULTS = [
    ("position_coded", Fault("cut", "answer half", orphan="session")),
    (TIMING, Fault("kill", "run", reports=1, orphan="same")),
    ("position_coded", Fault("kill", "prepare", orphan="same")),
    ("position_coded", Fault("stop", "run")),
    ("position_coded", Fault("exit0", "open")),
    ("position_coded", Fault("raise", "judge", nth=2)),
    ("position_coded", Fault("memory", "run", nth=3)),
    ("position_coded", Fault("quit", "close session")),
    ("position_coded", Fault("exit3", "answered", orphan="same")),
    (f"{ROW_CHECK}@", Fault("abort", "run", orphan="session")),
    (f"{ROW_CHECK}@", Fault("garbage", "start")),
    (TIMING, Fault("stall", "phase look", reports=1)),
    (TIMING, Fault("raise", "run in look", reports=1)),
    (TIMING, Fault("memory", "phase pools")),
    (TIMING, Fault("close-pipe", "answered")),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three checks, few and short rounds; the rest is a run as it is."""
    monkeypatch.setattr(process, "_REAP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(catalogue, "runs", lambda column, device: CHECKS)
    monkeypatch.setattr(run_module, "SignTest", partial(SignTest, max_rounds=ROUNDS))
    # a race that can be lost early would now and then end before the fault is due
    monkeypatch.setattr(SignTest, "hopeless", lambda *_: False)
    monkeypatch.setattr(
        racer,
        "RoundSettings",
        lambda **more: replace(RoundSettings(**more), discard_rounds=1, discard_ms=0.0),
    )
    monkeypatch.setitem(MIN_GROUP_MS, "cpu", 0.1)


def known() -> dict[str, Route]:
    return {"torch-sdpa": route_registry.get("torch-sdpa"), X: cast(Route, MortalRoute(X))}


def place() -> Target:
    """The tiny space on this machine."""
    return replace(target(), facts=collect("cpu", threads=1))


def sweep(run: OpenedRun) -> Progress:
    """One call: a child that proves, and one that times."""
    before = descendants(os.getpid())
    with (
        Worker("cpu", step_timeout_s=STEP_TIMEOUT_S) as proving,
        Worker("cpu", step_timeout_s=STEP_TIMEOUT_S) as timing,
    ):
        progress = Tuner(run, Crew([proving]), timing, Silent(), Deadline(None), None).sweep()
    assert_gone(descendants(os.getpid()) - before)
    return progress


def rounds_of(run: OpenedRun) -> dict[str, list[Any]]:
    """The stored rounds of each cell; none is missing among them."""
    found = {item.cell.id: list(run.repository.rounds(run.study, item.cell)) for item in run.cells}
    for rounds in found.values():
        assert [each["index"] for each in rounds] == list(range(len(rounds)))
    return found


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its schema and the study, and nothing in it; the fork server is there too."""
    folder = tmp_path_factory.mktemp("fresh")
    with Worker("cpu"), opened(folder, known(), place()):
        return folder


@pytest.mark.parametrize(
    ("check", "fault"),
    FAULTS + (MORE_FAULTS if FULL else []),
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_a_run_in_which_a_child_dies(
    check: str, fault: Fault, tmp_path: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(fresh, tmp_path, dirs_exist_ok=True)
    order = Order(fault, check)
    monkeypatch.setattr(prover, "ProveJob", order.prove)
    monkeypatch.setattr(racer, "TimeJob", order.time)
    steps = TIME_STEPS if check == TIMING else PROVE_STEPS
    kind = expected(fault, steps[fault.step]) if steps[fault.step] != "after" else None
    accused = isinstance(kind, FailureKind)

    with opened(tmp_path, known(), place()) as run:
        sweep(run)
        struck = order.column
        name = check.rstrip("@")
        first = {
            (proof.column.id, proof.cell_id, proof.route, proof.result.check): proof.result
            for proof in run.repository.all_proofs(run.fingerprint)
        }
        bad = {
            key: row
            for key, row in first.items()
            if row.status not in (CheckStatus.PASSED, CheckStatus.NOT_APPLICABLE)
        }
        if kind is None:
            assert bad == {}
        else:
            ((column_id, cell_id, route, found), row), *more = bad.items()
            assert more == []
            assert (column_id, found) == (struck.id, name)
            assert (cell_id is None) == (check not in (TIMING, f"{ROW_CHECK}@"))
            assert route == X or (check == TIMING and not accused)
            assert row.kind is kind or row.reason is kind
        rounds = rounds_of(run)

    with opened(tmp_path, known(), place()) as run:  # as after a restart
        progress = sweep(run)
        assert progress.settled == CELLS
        second = {
            (proof.column.id, proof.cell_id, proof.route, proof.result.check): proof.result
            for proof in run.repository.all_proofs(run.fingerprint)
        }
        for key, row in first.items():
            if row.status is not CheckStatus.UNPROVEN:
                assert second[key] == row
        again = rounds_of(run)
        assert all(again[cell_id][: len(before)] == before for cell_id, before in rounds.items())
        for item in run.cells:
            column = item.cell.column
            mine = run.book.verdict(known()[X], column, "cpu", item.cell)
            if accused and column == struck:
                assert (mine.status, mine.kind) == (Status.UNSAFE, kind)
            else:
                assert mine.status is Status.SAFE, mine
                assert again[item.cell.id]
            assert run.book.verdict(known()["torch-sdpa"], column, "cpu", item.cell).status is Status.SAFE
        decisions = run.repository.decisions(run.study)
        assert set(decisions) == {item.cell.id for item in run.cells}
