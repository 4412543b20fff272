"""A run that is killed or interrupted goes on where it stopped, and proves the same."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from pathlib import Path

import pytest

from autotune.tuner import run as run_module
from autotune.tuner.selftest import ControlResult, SelfTest
from tests.console import Place, Result, Script, cli

CELLS = 4


def assert_whole(place: Place) -> None:
    """Every cell once: in the queue, decided, and as a complete trial of Optuna's."""
    assert place.count("cell") == place.count("decision") == CELLS
    assert place.rows("SELECT DISTINCT state FROM trial") == [("complete",)]
    assert place.count("trial") == CELLS
    assert place.completed() == [(number, 1) for number in range(CELLS)]
    assert place.unended() == 0


def test_an_uninterrupted_run(finished: tuple[Place, Result]) -> None:
    place, result = finished
    assert result.code == 0, result.err
    assert_whole(place)
    summary = result.json
    assert summary["settled"] == summary["cells"] == CELLS
    assert summary["kills"] == summary["retries"] == 0
    assert not summary["out_of_budget"]
    assert Path(summary["table"]) == place.table


@pytest.mark.timeout(240)
def test_killed_five_times(place: Place, finished: tuple[Place, Result]) -> None:
    moments = [
        # while the self-test runs, and its planted kernels crash and hang
        lambda: place.count("study") == 1,
        lambda: place.count("proof") >= 3,
        # the second route's proofs
        lambda: place.count("proof", "route = 'torch-splitkv'") >= 4,
        lambda: place.count("round_chunk") >= 2,
        lambda: place.count("decision") >= 2,
    ]
    for number, moment in enumerate(moments):
        run = Script(["run", *place.flags()], place.folder)
        run.until(moment)
        run.send(signal.SIGKILL)
        assert run.end().code == -signal.SIGKILL
        run.assert_nothing_left()
        if number == 0:
            assert place.count("selftest") == 0
            place.with_selftest_of(finished[0])  # the four that follow need not wait for it
    result = cli("run", *place.flags(), "--json")
    assert result.code == 0, result.err
    assert result.json["settled"] == CELLS
    assert 1 <= result.json["kills"] <= 4  # the first came before any trial
    assert_whole(place)
    assert place.verdicts() == finished[0].verdicts()


def assert_interrupted(run: Script) -> None:
    """It ended as resumable, in one line, and took its children along."""
    result = run.end()
    run.assert_nothing_left()
    assert result.code == 130
    assert result.out == ""
    assert result.err.splitlines()[-1] == (
        "autotune: interrupted; what is stored stays, the same command goes on from there"
    )
    assert "Traceback" not in result.err


def test_interrupted(tested: Place, finished: tuple[Place, Result]) -> None:
    run = Script(["run", *tested.flags()], tested.folder)
    run.until(lambda: tested.count("proof") >= 2)
    run.send(signal.SIGINT)
    assert_interrupted(run)
    assert tested.unended() == 0
    assert tested.rows("SELECT state, kills FROM trial") == [("interrupted", 0)]
    assert not tested.table.exists()
    before = tested.verdicts()
    again = cli("run", *tested.flags(), "--json", "--trials", "1")
    assert again.code == 0
    assert (again.json["kills"], again.json["retries"]) == (0, 1)
    assert set(before) <= set(tested.verdicts()) <= set(finished[0].verdicts())


def test_terminated_while_it_starts(tested: Place) -> None:
    run = Script(["run", *tested.flags()], tested.folder)
    run.until(lambda: tested.count("study") == 1)
    run.send(signal.SIGTERM)
    assert_interrupted(run)
    assert tested.unended() == 0


def forget_decision(place: Place, *, optuna: str) -> str:
    """As if the process had died just before the decision of a cell was stored; the cell's id."""
    with contextlib.closing(sqlite3.connect(place.file)) as connection, connection:
        cell, trial = connection.execute("SELECT cell_id, optuna_id FROM trial LIMIT 1").fetchone()
        connection.execute("DELETE FROM decision WHERE cell_id = ?", (cell,))
        connection.execute("UPDATE trial SET state = 'running' WHERE cell_id = ?", (cell,))
        connection.execute("UPDATE trials SET state = ? WHERE trial_id = ?", (optuna, trial))
    return str(cell)


def test_killed_between_the_last_round_and_the_decision(done: Place) -> None:
    rounds, decisions = (
        done.count("round_chunk"),
        done.rows("SELECT cell_id, reason FROM decision ORDER BY 1"),
    )
    cell = forget_decision(done, optuna="RUNNING")
    result = cli("run", *done.flags(), "--json")
    assert result.code == 0, result.err
    assert result.json["settled_by_this_call"] == 1
    assert result.json["kills"] == 1
    assert_whole(done)
    assert done.count("round_chunk") == rounds  # its rows were complete
    assert done.rows("SELECT cell_id, reason FROM decision ORDER BY 1") == decisions
    assert done.count("trial", f"cell_id = '{cell}' AND retries = 1") == 1


@pytest.mark.parametrize("state", ["running", "complete"])
def test_killed_between_the_decision_and_optuna(done: Place, state: str) -> None:
    with contextlib.closing(sqlite3.connect(done.file)) as connection, connection:
        cell, trial = connection.execute("SELECT cell_id, optuna_id FROM trial LIMIT 1").fetchone()
        connection.execute("UPDATE trial SET state = ? WHERE cell_id = ?", (state, cell))
        connection.execute("UPDATE trials SET state = 'RUNNING' WHERE trial_id = ?", (trial,))
        connection.execute("DELETE FROM trial_values WHERE trial_id = ?", (trial,))
    result = cli("run", *done.flags(), "--json")
    assert result.code == 0, result.err
    assert result.json["settled_by_this_call"] == 0
    assert result.json["kills"] == 0
    assert_whole(done)
    assert done.count("trial_values") == CELLS


def test_nothing_is_left_to_do(done: Place, finished: tuple[Place, Result]) -> None:
    result = cli("run", *done.flags(), "--json")
    assert result.code == 0, result.err
    assert result.json["settled_by_this_call"] == 0
    assert result.json["settled"] == CELLS
    assert done.verdicts() == finished[0].verdicts()
    assert done.count("round_chunk") == finished[0].count("round_chunk")
    assert result.json["reasons"] == finished[1].json["reasons"]


def test_a_budget_that_ends_at_once_keeps_the_self_test(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tuple(
        ControlResult(f"planted-{kind}", "reference", kind, kind, kind != "safe") for kind in ("safe", "hang")
    )
    monkeypatch.setattr(run_module, "run_selftest", lambda *_, **__: SelfTest(results))
    first = cli("run", *place.flags(), "--json", "--budget", "0.1s")
    assert first.code == 0, first.err
    assert first.json["out_of_budget"]
    assert first.json["settled"] == 0
    assert first.json["reasons"] == {"unproven": CELLS}
    assert place.count("selftest", "passed") == 1
    assert place.table.exists()
    assert place.count("trial") == 0
    second = cli("run", *place.flags(), "--trials", "1", "--json")
    assert "controls passed before" in second.err
    assert second.json["settled_by_this_call"] == 1
