"""``--cells FILE``: single cells of a space, planned and refused as the other filters are."""

from __future__ import annotations

from pathlib import Path

from autotune.cli.context import ask
from tests.console import cli


def test_plan_counts_the_picked_and_the_whole(tmp_path: Path) -> None:
    cells = [item.cell for item in ask("h200", "sglang", None).grid.cells]
    path = tmp_path / "cells.txt"
    path.write_text(f"{cells[5].id}\n{cells[900]}  # as a message writes it\n")
    flags = ("plan", "--gpu", "h200", "--engine", "sglang,generic", "--cells", path)
    plan = cli(*flags, "--json")
    assert plan.code == 0, plan.err
    assert (plan.json["cells"], plan.json["columns"], plan.json["picked_of"]) == (2, 2, 2160)
    assert [entry["kv_len"] for entry in plan.json["entries"]] == [[cells[5].kv_high], [cells[900].kv_high]]
    assert "2 cells in 2 columns, 0 too large for the device; picked of 2160 and decided" in cli(*flags).out
    # of what the other filters leave
    other = "1" if cells[5].column.batch_size != 1 else "2"
    refused = cli(*flags, "--batch", other)
    assert refused.code == 2 and f"line 1: '{cells[5].id}': no cell of this space" in refused.err


def test_refusals_are_one_line(tmp_path: Path) -> None:
    for command in ("plan", "run", "export"):
        refused = cli(command, "--gpu", "h200", "--cells", tmp_path / "none.txt")
        assert (refused.code, refused.out) == (2, "")
        assert "none.txt: No such file or directory" in refused.err and refused.err.count("\n") == 1
