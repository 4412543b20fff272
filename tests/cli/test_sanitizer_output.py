"""Where a person meets what compute-sanitizer found: ``explain``, ``show`` and the end of ``run``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.table.dump import write_table
from autotune.table.model import Unsafe
from tests.console import Place, cli
from tests.table.samples import OTHER, sample_cells, table_of

NOTE = (
    "sanitizer: invalid global read of 4 bytes at 0x10, 129 bytes after an allocation of 1,024 bytes, in mha"
)
DETAIL = f"reference: CUDA error: an illegal memory access\n was encountered; {NOTE}"
CALL = ["--heads", "8/1/128", "--batch", "4", "--q-len", "4", "--facts", "table"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    accused = Unsafe(OTHER, "8/1/128 batch 6", "illegal_access", DETAIL, "autotune prove x")
    path = tmp_path / "cpu.generic.yaml"
    write_table(table_of(sample_cells(), unsafe=[accused]), path)
    return path


def test_explain(table: Path) -> None:
    text = cli("explain", table, *CALL)
    assert text.code == 0, text.err
    said = " ".join(DETAIL.split())
    assert f"  unsafe in this table: {OTHER} illegal_access in 8/1/128 batch 6: {said}\n" in text.out
    (row,) = cli("explain", table, *CALL, "--json").json["unsafe"]
    assert (row["route"], row["kind"], row["detail"]) == (OTHER, "illegal_access", DETAIL)


def test_show(table: Path) -> None:
    assert NOTE in cli("show", table).out


@pytest.mark.parametrize(("flags", "calls"), [([], 1), (["--no-sanitizer"], 0)])
def test_run(done: Place, flags: list[str], calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def triage(run: object, deadline: object, *, first: Callable[[], object], device: str) -> str:
        asked.append(run)
        first()  # the table is written, and once more at the end
        return "1 unsafe memory verdict looked at\nwith it"

    monkeypatch.setattr("autotune.tuner.triage.triage", triage)
    result = cli("run", *done.flags(), *flags)
    assert result.code == 0, result.err
    assert len(asked) == calls
    assert result.err.count("autotune: 1 unsafe memory verdict looked at with it\n") == calls
