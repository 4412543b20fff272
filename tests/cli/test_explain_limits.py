"""What ``autotune explain`` says of limits: a table keeps an entry's, and a cell may have fewer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotune.table.dump import write_table
from tests.console import cli
from tests.table import samples
from tests.table.samples import FASTER, HIGH, LOW, decided

CALL = ["--heads", "8/1/128", "--q-len", "4", "--batch", "1", "--facts", "table"]


def test_the_limits_of_an_entry_are_said_to_be_the_entry_s(tmp_path: Path) -> None:
    narrow, wide = "page ids below 1000", "page ids below 2000"
    cells = []
    for batch, limit in ((1, wide), (2, narrow)):
        for kv in (LOW, HIGH):
            cell = decided(batch, kv, FASTER)
            assert cell.verdict is not None
            cells.append(replace(cell, verdict=replace(cell.verdict, limits=(limit,))))
    path = tmp_path / "table.yaml"
    write_table(samples.table_of(cells), path)
    said = cli("explain", path, *CALL).out.splitlines()
    assert said[0].startswith(f"{samples.SPLIT}: ")
    # batch 1 is proven with the wide one alone, which the table no longer knows
    assert [line for line in said if "limit" in line] == [
        f"  limit in some cell of this entry: {limit}" for limit in (narrow, wide)
    ]
    assert f"  proof of {samples.SPLIT} in this entry: at least 9 checks a column, 200 launches, worst" in (
        line.partition(" error")[0] for line in said
    )
    proof = cli("explain", path, *CALL, "--json").json["proof"]
    assert proof["of"] == "entry" and proof["limits"] == [narrow, wide]
