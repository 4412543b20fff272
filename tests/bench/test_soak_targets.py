"""``benchmarks/soak.py``: which cells it draws from, what it attests there, and what it calls a defect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind
from autotune.hardware.collect import collect
from autotune.router import Router
from autotune.table.dump import write_table
from autotune.tuner.deadline import Deadline
from autotune.worker.jobs import ProveJob
from benchmarks.soak import Soaked, Target, defect, job_of, main, nbytes, targets
from tests.table.samples import FACTS, FALLBACK, FASTER, HIGH, LOW, SLOWER, SPLIT, decided, table_of

PADDING = "tail_padding_512"
TABLE = table_of(
    [
        decided(1, LOW, SLOWER),
        decided(1, HIGH, FASTER, requires=(PADDING,)),
        decided(2, LOW, FASTER),
        decided(2, HIGH, FASTER),
        decided(1, LOW, FASTER, q_len=3),
        decided(1, HIGH, SLOWER, q_len=3),
    ]
)


def found() -> dict[tuple[int, int, int], Target]:
    return {(t.column.q_len, t.column.batch_size, t.kv_high): t for t in targets(TABLE)}


def test_cells_where_a_route_is_named() -> None:
    cells = found()
    assert set(cells) == {(4, 1, 4096), (4, 2, 1024), (4, 2, 4096), (3, 1, 1024)}
    assert [cells[4, 2, high].kv_low for high in (1024, 4096)] == [4, 1025]
    # of the entry, as the router asks for it
    assert cells[4, 2, 1024].requires == {PADDING}
    assert cells[3, 1, 1024].requires == frozenset()


def test_the_route_is_the_routers_and_its_needs_are_attested(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    write_table(TABLE, path)
    router = Router.load(path, facts=FACTS)
    for target in found().values():
        assert job_of(router, target, FACTS, 1).route == SPLIT
    bare = found()[4, 2, 1024]._replace(requires=frozenset())
    assert job_of(router, bare, FACTS, 1).route == FALLBACK


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (CheckResult("soak", 1, CheckStatus.PASSED, 1), None),
        (CheckResult("soak", 1, CheckStatus.PASSED, 1, requires=("finite_pool",)), None),
        (
            CheckResult("soak", 1, CheckStatus.PASSED, 1, requires=("finite_pool", PADDING)),
            f"requires {PADDING}, which the table does not",
        ),
        (
            CheckResult("soak", 1, CheckStatus.FAILED, 1, kind=FailureKind.HANG, detail="no end"),
            "hang: no end",
        ),
    ],
)
def test_what_is_a_defect(row: CheckResult, said: str | None) -> None:
    target = found()[3, 1, 1024]._replace(requires=frozenset({"finite_pool"}))
    assert defect(row, target) == said


def test_a_launch_of_many_rows_is_not_taken_for_the_longest_of_each() -> None:
    def pools(batch: int) -> float:
        target = found()[4, 2, 4096]
        wide = target._replace(column=replace(target.column, batch_size=batch))
        empty = wide._replace(kv_high=0)
        return (nbytes(wide) - nbytes(empty)) / 2**20

    # K and V of 4096 tokens of one head are 2 MiB, and a launch has each three times
    assert (pools(1), pools(4)) == (6.0, 24.0)
    assert 0.5 * 256 * 6.0 < pools(256) < 0.6 * 256 * 6.0


def test_a_failure_is_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    write_table(TABLE, path)
    target = found()[4, 2, 1024]
    job = job_of(Router.load(path, facts=FACTS), target, FACTS, 1)
    seen = Soaked()
    seen.add(
        job, CheckResult("soak", 1, CheckStatus.FAILED, 1, kind=FailureKind.HANG, detail="no end"), target
    )
    said = capsys.readouterr().out
    assert said.startswith("FAILED: hang: no end\n  autotune prove torch-splitkv ")
    named = targets(TABLE)
    seen.report(named, [each for each in named if each.column.q_len == 4], 1.0)
    said = capsys.readouterr().out
    assert "left out: 1 cells" in said and "in 1 of 4 cells, 1 s: 1 failures, 0 not run" in said
    assert f"| {target.layers} | 4 | 1 | 1 |" in said and target.layers.endswith(" KV")


def test_real_launches_until_the_time_is_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over with the first row: a child may take long to start where others work."""
    rows: list[CheckResult] = []
    add = Soaked.add

    def counted(found: Soaked, job: ProveJob, row: CheckResult, target: Target) -> None:
        rows.append(row)
        add(found, job, row, target)

    class UntilTheFirst(Deadline):
        @property
        def passed(self) -> bool:
            return bool(rows)

    monkeypatch.setattr(Soaked, "add", counted)
    monkeypatch.setattr("benchmarks.soak.Deadline", UntilTheFirst)
    path = tmp_path / "table.yaml"
    write_table(table_of([decided(1, LOW, FASTER)], facts=collect("cpu", threads=1)), path)
    assert main([str(path), "--device", "cpu", "--seconds", "100"]) == 0
    said = capsys.readouterr().out
    assert "| torch-splitkv | " in said and "in 1 of 1 cells" in said and "0 failures, 0 not run" in said
