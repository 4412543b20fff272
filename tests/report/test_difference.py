"""``compare`` and how it is shown: facts first, runs of equal changes in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.domain.decision import Decision, Reason
from autotune.domain.shape import Shape
from autotune.report.difference import fold, spans
from autotune.table.diff import Difference, compare
from autotune.table.model import Quarantine, RoutingTable, Unsafe
from tests.table import samples
from tests.table.samples import FASTER, FASTER_OTHER, SLOWER, decided, table_of

ROWS = ((4, 1024), (1025, 2048), (2049, 4096))


def grid(*columns: tuple[int, str], q_len: int = 4, **options: object) -> RoutingTable:
    """Batches with a decision a row: ``s`` torch-splitkv, ``a`` acme-decode, ``.`` the fallback."""
    kinds = {"s": FASTER, "a": FASTER_OTHER, ".": SLOWER}
    cells = [
        decided(batch, (q_len if low == 4 else low, high), kinds[letter], q_len=q_len)
        for batch, letters in columns
        for (low, high), letter in zip(ROWS, letters, strict=True)
    ]
    return table_of(cells, **options)  # type: ignore[arg-type]


def test_equal_tables() -> None:
    table = samples.sample()
    found = compare(table, table)
    assert (found.same, found.differences, found.changes) == (True, (), ())
    assert found.places == 12  # two rows of four sizes and two intervals
    later = replace(table, generated=table.generated._replace(at="2027-01-01T00:00:00Z"))
    assert compare(table, later).same


def test_ratios_of_both_sides() -> None:
    changed = compare(grid((1, "s.s")), grid((1, "sas"))).changes
    assert [(c.kv_low, c.before, c.after, c.low, c.vs_stock) for c in changed] == [
        (1025, "fallback", "acme-decode", (None, 1.05), (1.0, None))
    ]


def test_ratios_alone_are_no_change() -> None:
    other = Decision(samples.SPLIT, Reason.PROVEN_FASTER, "", 1.5, 1.6, 1.4)
    assert compare(table_of([decided(1, (4, 4096), FASTER)]), table_of([decided(1, (4, 4096), other)])).same


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"driver": "581.1"}, Difference("software.driver", "580.159.03", "581.1")),
        ({"flashinfer": "0.6.18.post1"}, Difference("software.flashinfer", "0.7.2", "0.6.18.post1")),
    ],
)
def test_facts(change: dict[str, str], wanted: Difference) -> None:
    old = grid((1, "sss"), facts=samples.CUDA_FACTS)
    facts = replace(samples.CUDA_FACTS, software={**samples.CUDA_FACTS.software, **change})
    found = compare(old, replace(old, facts=facts))
    assert found.differences == (wanted,)
    assert not found.same
    assert found.changes == ()


def test_policy_and_routes() -> None:
    old = grid((1, "sss"))
    new = grid((1, "aaa"), policy=old.policy._replace(margin=0.05, layers=15))
    assert compare(old, new).differences == (
        Difference("policy.margin", 0.03, 0.05),
        Difference("policy.layers", None, 15),
        Difference("route torch-splitkv", "decode", None),
        Difference("route acme-decode", None, "decode"),
    )


def test_accusations_quarantines_and_conditions() -> None:
    old = table_of([decided(1, (4, 4096), FASTER)])
    held = Quarantine(samples.OTHER, "node 7", "2026-12-01T00:00:00Z", q_len=4)
    accused = Unsafe(samples.OTHER, "8/1/128 batch 6", "hang", "", "autotune prove x")
    new = table_of(
        [decided(1, (4, 4096), FASTER, requires=("finite_pool",))], unsafe=[accused], quarantine=[held]
    )
    assert compare(old, new).differences == (
        Difference("unsafe", None, "acme-decode hang in 8/1/128 batch 6"),
        Difference("quarantine", None, "acme-decode q_len 4: node 7"),
        Difference("requires of torch-splitkv", (), ("finite_pool",)),
    )


def test_engines_with_another_layout_are_compared_all_the_same() -> None:
    theirs = Shape(8, 1, 128, 64, kv_layout="interleaved-nhd")
    old = table_of([decided(1, (4, 4096), FASTER), decided(1, (4, 4096), FASTER, q_len=2)])
    new = table_of(
        [
            decided(1, (4, 4096), SLOWER, shape=theirs, fallback="torch-eager", max_context=8192),
            decided(1, (2, 4096), FASTER, q_len=2, shape=theirs, fallback="torch-eager", max_context=8192),
        ],
    )
    found = compare(old, new)
    assert set(found.differences) == {
        Difference("route torch-sdpa", "context", None),
        Difference("route torch-eager", None, "context"),
        Difference("page_size", 16, 64, 2),
        Difference("kv_layout", "fused-nhd", "interleaved-nhd", 2),
        Difference("max_context", 4096, 8192, 2),
        Difference("fallback", "torch-sdpa", "torch-eager", 2),
    }
    cells = [(c.q_len, c.kv_high, c.before, c.after) for c in found.changes if c.kv_high]
    assert (4, 4096, "torch-splitkv", "fallback") in cells
    assert all(before and after for _, _, before, after in cells)


def test_a_doubtful_match_is_none() -> None:
    one = table_of([decided(1, (4, 4096), FASTER)])
    two = table_of(
        [
            decided(1, (4, 4096), FASTER, shape=Shape(8, 1, 128, page))  # which of them is meant?
            for page in (32, 64)
        ]
    )
    found = compare(one, two)
    assert found.places == 0
    assert {(c.before, c.after) for c in found.changes} == {("torch-splitkv", None), (None, "torch-splitkv")}


def test_runs_of_equal_changes_are_one_line() -> None:
    old = grid((1, "sss"), (2, "sss"), (4, "sss"), (8, "sss"))
    new = grid((1, "..s"), (2, "..s"), (4, "s.s"), (8, "sss"))
    folds = [
        (each.batches, each.kv_low, each.kv_high, each.before, each.after, len(each.changes))
        for each in fold(compare(old, new).changes)
    ]
    assert folds == [
        ((1, 2, 4), None, None, "torch-splitkv", "fallback", 3),
        ((1, 2), 1, 2048, "torch-splitkv", "fallback", 4),
        ((4,), 1025, 2048, "torch-splitkv", "fallback", 1),
    ]


def test_accept_lengths_are_folded_too() -> None:
    def both(letters: str) -> RoutingTable:
        cells = [*grid((1, letters), q_len=2).entries, *grid((1, letters), q_len=4).entries]
        return replace(grid((1, letters), q_len=2), entries=tuple(cells))

    old, new = both("sss"), both("s.s")
    folds = [(each.q_lens, each.kv_low, each.kv_high) for each in fold(compare(old, new).changes)]
    assert folds == [((2, 4), None, None), ((2, 4), 1025, 2048)]


@pytest.mark.parametrize(
    ("numbers", "text"), [((1,), "1"), ((1, 2, 3, 8), "1-3, 8"), ((8, 2), "2, 8"), ((4, 5), "4-5")]
)
def test_spans(numbers: tuple[int, ...], text: str) -> None:
    assert spans(numbers) == text
