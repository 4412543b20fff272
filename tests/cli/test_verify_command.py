"""``autotune verify TABLE``: real kernels on this CPU, one cell at a time."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.exits import CliError
from autotune.cli.verify import _count
from autotune.domain.fingerprint import Facts
from autotune.table.dump import write_table
from autotune.table.load import load_table
from autotune.table.model import RoutingTable
from tests.console import Place, Result, cli
from tests.table import samples


def copied(place: Place, folder: Path, **changes: Any) -> Path:
    """The finished table with something else in it."""
    path = folder / "table.yaml"
    write_table(replace(load_table(place.table), **changes), path)
    return path


@pytest.fixture
def verified(tmp_path: Path, finished: tuple[Place, Result]) -> tuple[Place, Result]:
    """A verification of one cell whose database is kept."""
    place = Place(tmp_path).with_selftest_of(finished[0])
    return place, cli("verify", finished[0].table, "--sample", "1", "--db", place.url, "--json")


def test_one_cell_and_again_with_a_stored_fault(
    verified: tuple[Place, Result], finished: tuple[Place, Result]
) -> None:
    place, result = verified
    before = (finished[0].table.read_bytes(), finished[0].count("proof"), finished[0].count("study"))
    assert result.code == 0, result.err
    data = result.json
    letters = {row["letter"]: row for row in data["letters"]}
    assert sum(row["answered"] for row in letters.values()) == data["answered"] == 4
    assert data["sampled"] == len(data["cells"]) == len(letters)  # one of each letter
    assert data["routes"] == ["torch-sdpa", "torch-splitkv"]
    assert (data["margin"], data["multiplicity"], data["seed"]) == (0.05, len(letters), 0)
    # whether this machine repeats its speed is its affair; that it is safe is not
    assert data["outcomes"]["unsafe"] == data["outcomes"]["open"] == 0
    assert {cell["name"] for cell in data["cells"]} <= {
        f"8/1/128 page 16 fp32/fp32 q_len 2 batch {batch} kv {kv}"
        for batch in (1, 2)
        for kv in ("2..64", "65..128")
    }
    assert place.count("study", "space_name = 'verify'") == place.count("study") == 1
    assert place.count("proof") > 20

    # a second call goes on from what is stored: here, a fault of the fallback
    with contextlib.closing(sqlite3.connect(place.file)) as connection, connection:
        connection.execute(
            "UPDATE proof SET status = 'failed', kind = 'wrong_output', repro = 'autotune prove this'"
            " WHERE route = 'torch-sdpa' AND check_name = 'poisoned_output'"
        )
    again = cli("verify", finished[0].table, "--sample", "1", "--db", place.url)
    assert again.code == 1, again.err
    assert "unsafe" in again.out
    assert "torch-sdpa: wrong_output" in again.out
    assert "again: autotune prove this" in again.out
    assert "withdraw the route with autotune quarantine" in again.out
    assert before == (finished[0].table.read_bytes(), finished[0].count("proof"), finished[0].count("study"))


def test_a_spent_budget_leaves_cells_open(tested: Place, finished: tuple[Place, Result]) -> None:
    flags = ["--all", "--db", tested.url, "--budget", "0.001s"]
    result = cli("verify", finished[0].table, *flags)
    assert result.code == 0, result.err
    assert "4 open: the budget is spent" in result.out
    assert "4 of 4 answered cells, seed 0" in result.out


def other(facts: Facts) -> Facts:
    return replace(facts, hardware={**facts.hardware, "name": "Another CPU"})


def no_engine(table: RoutingTable) -> dict[str, Any]:
    return {"policy": table.policy._replace(engine="ours")}


def no_cell(table: RoutingTable) -> dict[str, Any]:
    return {"entries": ()}


def a_foreign_route(table: RoutingTable) -> dict[str, Any]:
    return {"policy": table.policy._replace(stock="acme"), "families": {**table.families, "acme": "decode"}}


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda table: {"facts": other(table.facts)}, 3, "hardware.name: table 'Another CPU', here "),
        (lambda table: {"facts": samples.CUDA_FACTS}, 3, "here no CUDA device"),
        (no_engine, 2, "engine ours is no shipped profile; give its file: --engine FILE"),
        (no_cell, 2, "answers no cell from evidence"),
        (a_foreign_route, 2, "speaks of the route acme; its package is not installed here"),
    ],
)
def test_a_table_that_cannot_be_verified_here(
    change: Callable[[RoutingTable], dict[str, Any]],
    code: int,
    said: str,
    finished: tuple[Place, Result],
    tmp_path: Path,
) -> None:
    path = copied(finished[0], tmp_path, **change(load_table(finished[0].table)))
    result = cli("verify", path)
    assert (result.code, result.out) == (code, ""), result.err
    assert said in result.line
    assert str(path) in result.line


def test_the_study_of_the_table_is_never_its_own_witness(done: Place, finished: tuple[Place, Result]) -> None:
    result = cli("verify", finished[0].table, "--db", done.url)
    assert result.code == 2
    assert "holds the table's own study, whose proofs would be read and not repeated" in result.line
    assert done.count("study") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sample", "5%", "--all"], "--sample and --all"),
        (["--sample", "0"], "--sample '0'"),
        (["--sample", "101%"], "--sample '101%'"),
        (["--sample", "some"], "such as 40 or 5%"),
        (["--seed", "-1"], "--seed"),
        (["--budget", "soon"], "--budget"),
        (["--routes", "torch-splitkv"], "speaks of the route torch-sdpa; --routes leaves it out"),
    ],
)
def test_a_wrong_verify(flags: list[str], said: str, finished: tuple[Place, Result]) -> None:
    result = cli("verify", finished[0].table, *flags)
    assert (result.code, result.out) == (2, "")
    assert said in result.line


@pytest.mark.parametrize(
    ("text", "cells"), [("5%", 45), ("0.1%", 1), ("100%", 888), ("12", 12), (" 5 % ", 45), ("9999", 9999)]
)
def test_how_many_cells(text: str, cells: int) -> None:
    assert _count(text, 888) == cells


@pytest.mark.parametrize("text", ["", "%", "-1", "1e3", "nan", "0%", "5%%"])
def test_no_sample(text: str) -> None:
    with pytest.raises(CliError, match="write a number of cells or a share"):
        _count(text, 888)


def test_json_of_a_spent_budget_is_complete(tested: Place, finished: tuple[Place, Result]) -> None:
    result = cli("verify", finished[0].table, "--all", "--db", tested.url, "--budget", "0.001s", "--json")
    data = json.loads(result.out)
    assert data["out_of_budget"] is True
    assert [cell["outcome"] for cell in data["cells"]] == ["open"] * 4
    assert all(set(cell["low"]) == {"before", "after"} for cell in data["cells"] if "low" in cell)
