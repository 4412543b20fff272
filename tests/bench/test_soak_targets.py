"""``benchmarks/soak.py``: which cells it draws from, what it attests there, and what it calls a defect."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind
from autotune.router import Router
from autotune.table.dump import write_table
from benchmarks.soak import Target, defect, job_of, targets
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
