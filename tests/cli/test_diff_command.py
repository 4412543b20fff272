"""``autotune diff A B``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.table.dump import write_table
from autotune.table.model import RoutingTable
from tests.console import cli
from tests.table import samples
from tests.table.samples import FASTER, SLOWER, decided, table_of

CELLS = [decided(size, row, FASTER) for size in (1, 2, 4, 8) for row in (samples.LOW, samples.HIGH)]
WITHOUT = [
    decided(size, row, SLOWER if row == samples.HIGH else FASTER)
    for size in (1, 2, 4, 8)
    for row in (samples.LOW, samples.HIGH)
]


def written(folder: Path, name: str, table: RoutingTable) -> Path:
    path = folder / name
    write_table(table, path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    facts = replace(samples.FACTS, software={**samples.FACTS.software, "torch": "2.14.0"})
    old = written(tmp_path, "old.yaml", table_of(CELLS))
    return old, written(tmp_path, "new.yaml", table_of(WITHOUT, facts=facts))


def test_the_same_table_is_one_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    result = cli("diff", files[0], files[0], "--exit-code")
    assert (result.code, result.err) == (0, "")
    assert result.out == "the same table: no fact, policy, route or letter differs in 8 cells\n"
    table = table_of(CELLS)
    later = replace(table, generated=table.generated._replace(study="45"))
    again = cli("diff", files[0], written(tmp_path, "later.yaml", later), "--exit-code")
    assert again.code == 0
    assert again.out.startswith("times, ratios and counts apart, the same: ")


def test_what_differs_comes_first_and_runs_are_folded(files: tuple[Path, Path]) -> None:
    result = cli("diff", *files)
    assert (result.code, result.err) == (0, "")
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[1] == "software.torch 2.13.0 2.14.0"
    kept = "8/1/128 bf16/bf16/bf16 4 1, 2, 4, 8"
    assert lines[4:6] == [
        f"{kept} any torch-splitkv fallback",
        f"{kept} 1025..4096 torch-splitkv fallback 1.123 -> - 1.200 -> 1.000",
    ]
    assert lines[-1] == "letters differ in 4 of the 8 cells that both have; 0 cells that only one has"
    assert "\x1b" not in result.out


def test_exit_code(files: tuple[Path, Path]) -> None:
    assert cli("diff", *files, "--exit-code").code == 1
    assert cli("diff", *files, "--exit-code", "--json").code == 1
    assert cli("diff", *files, "--json").code == 0


def test_json_has_every_place(files: tuple[Path, Path]) -> None:
    data = cli("diff", *files, "--json").json
    assert data["same"] is False
    assert data["places"] == 8
    assert data["differences"] == [
        {"what": "software.torch", "before": "2.13.0", "after": "2.14.0", "entries": 1}
    ]
    cells = [change for change in data["changes"] if change["kv_high"]]
    assert [(change["batch"], change["kv_low"], change["kv_high"]) for change in cells] == [
        (size, 1025, 4096) for size in (1, 2, 4, 8)
    ]
    assert {change["low"]["before"] for change in cells} == {1.1234}
    assert len(data["changes"]) == 8


def test_a_terminal_gets_an_overview_and_says_what_is_left_out(tmp_path: Path) -> None:
    rows = [(4 + 10 * step, 13 + 10 * step) for step in range(140)]
    old = [decided(1, row, FASTER) for row in rows]
    new = [decided(1, row, SLOWER if step % 2 else FASTER) for step, row in enumerate(rows)]
    paths = written(tmp_path, "a.yaml", table_of(old)), written(tmp_path, "b.yaml", table_of(new))
    text = cli("diff", *paths).out
    assert len(text.splitlines()) < 70
    assert "and 10 places more in 10 groups; --json has all" in text
    assert len(cli("diff", *paths, "--json").json["changes"]) == 70


def test_a_bad_file_is_one_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(files[0].read_bytes()[:-9])
    for pair in ((bad, files[0]), (files[0], bad), (files[0], tmp_path / "none.yaml")):
        result = cli("diff", *pair)
        assert (result.code, result.out) == (2, "")
        assert ("bad.yaml" if bad in pair else "none.yaml") in result.line
