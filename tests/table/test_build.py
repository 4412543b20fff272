from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from autotune.domain.decision import FALLBACK_LETTERS, Decision, Reason
from autotune.domain.verdict import FailureKind, Status, Verdict
from autotune.table.build import DecidedCell, build_entries, build_table
from autotune.table.dump import dump_table
from autotune.table.errors import TableError
from autotune.table.letters import RESERVED, agree, build_legend
from autotune.table.load import load_table
from autotune.table.model import Quarantine, RoutingTable
from autotune.table.quarantine import apply_quarantine
from autotune.table.validate import validate
from tests.table import samples
from tests.table.samples import FASTER, FASTER_OTHER, HIGH, LOW, SLOWER, UNSAFE, decided


def rows(cells: list[DecidedCell]) -> dict[str, str]:
    (entry,) = build_entries(cells)
    grid = {str(row.kv_high): row.letters for row in entry.routes.rows}
    return {**grid, "any": entry.routes.any}


def eager(cells: list[DecidedCell]) -> dict[str, str]:
    (entry,) = build_entries(cells)
    assert entry.eager is not None
    return {str(row.kv_high): row.letters for row in entry.eager.routes.rows}


def test_the_sample_reads_as_decided() -> None:
    (entry,) = samples.sample().entries
    assert rows(samples.sample_cells()) == {"1024": ".sss", "4096": "ssss", "any": ".sss"}
    assert eager(samples.sample_cells()) == {"1024": "s!", "4096": "ss"}
    assert entry.batch_size == (1, 2, 4, 8)  # samples inside intervals are no captured sizes
    assert entry.speedup.low == ((None, 1.1234, 1.1234, 1.1234), (1.1234,) * 4)
    assert entry.speedup.vs_stock[0] == (1.0, 1.2, 1.2, 1.2)
    (proof,) = entry.proof
    assert (proof.route, proof.checks, proof.launches) == (samples.SPLIT, 9, 600)
    assert (proof.worst_error, proof.fallback_error) == (0.004, 0.003)


@pytest.mark.parametrize("reason", FALLBACK_LETTERS)
def test_each_reason_has_its_letter(reason: Reason) -> None:
    cells = [decided(1, (4, 4096), Decision(None, reason))]
    assert rows(cells) == {"4096": FALLBACK_LETTERS[reason], "any": FALLBACK_LETTERS[reason]}


def test_a_missing_cell_is_unproven() -> None:
    cells = [decided(1, LOW, FASTER), decided(2, HIGH, FASTER)]
    assert rows(cells) == {"1024": "s?", "4096": "?s", "any": "??"}


def test_a_row_is_named_only_where_one_cell_covers_it_all() -> None:
    gap = [decided(1, (100, 200), FASTER), decided(1, (201, 4096), FASTER)]
    assert rows(gap) == {"99": "?", "200": "s", "4096": "s", "any": "?"}
    uneven = [decided(1, (4, 2000), FASTER), decided(1, (2001, 4096), SLOWER), decided(2, (4, 4096), FASTER)]
    assert rows(uneven) == {"2000": "ss", "4096": ".s", "any": ".s"}


def test_rows_short_of_max_context_name_no_any() -> None:
    assert rows([decided(1, LOW, FASTER)]) == {"1024": "s", "any": "?"}


def test_any_of_two_routes_is_the_fallback() -> None:
    cells = [decided(1, LOW, FASTER), decided(1, HIGH, FASTER_OTHER)]
    assert rows(cells) == {"1024": "s", "4096": "A", "any": "."}


ALL = (4, 4096)


def test_an_interval_needs_both_ends_and_every_sample() -> None:
    ends = [decided(2, ALL, FASTER), decided(8, ALL, FASTER)]
    inside = [decided(5, ALL, FASTER, interval=(2, 8)), decided(6, ALL, FASTER, interval=(2, 8))]
    assert eager(ends + inside) == {"4096": "s"}
    assert eager(ends + inside[:1]) == {"4096": "s"}
    for odd, letter in ((SLOWER, "."), (UNSAFE, "!"), (FASTER_OTHER, ".")):
        assert eager([*ends, inside[0], decided(6, ALL, odd, interval=(2, 8))]) == {"4096": letter}
        assert eager([decided(2, ALL, odd), ends[1], *inside]) == {"4096": letter}
        assert eager([ends[0], decided(8, ALL, odd), *inside]) == {"4096": letter}
        assert eager([*ends, decided(4, ALL, odd), *inside]) == {"4096": letter}  # a captured size within
    assert eager([*ends, inside[0], decided(6, LOW, FASTER, interval=(2, 8))]) == {"1024": "s", "4096": "?"}


def test_an_interval_without_its_ends_claims_nothing() -> None:
    (entry,) = build_entries([decided(2, ALL, FASTER), decided(5, ALL, FASTER, interval=(2, 8))])
    assert entry.eager is None
    assert build_entries([decided(5, ALL, FASTER, interval=(2, 8))]) == ()


def test_entries_split_by_what_a_kernel_is_compiled_for() -> None:
    cells = [
        decided(1, ALL, SLOWER),
        decided(1, (5, 4096), SLOWER, q_len=5),
        decided(1, ALL, SLOWER, shape=samples.OTHER_SHAPE),
        decided(1, (4, 300), SLOWER, max_context=300),
        decided(2, ALL, SLOWER, fallback="torch-eager"),
    ]
    entries = build_entries(cells)
    assert len(entries) == 5
    assert build_entries(list(reversed(cells))) == entries
    validate(samples.table_of(cells))


def test_contradicting_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        build_entries([decided(1, LOW, FASTER), decided(1, ALL, FASTER)])
    with pytest.raises(ValueError, match="two fallbacks"):
        build_entries([decided(1, LOW, SLOWER), decided(1, HIGH, SLOWER, fallback="torch-eager")])
    inside = [
        decided(5, ALL, FASTER, interval=(2, 8)),
        decided(6, ALL, SLOWER, interval=(2, 8), fallback="torch-eager"),
    ]
    with pytest.raises(ValueError, match="two fallbacks"):
        build_entries([decided(2, ALL, FASTER), decided(8, ALL, FASTER), *inside])
    overlapping = [decided(3, ALL, FASTER, interval=(2, 8)), decided(5, ALL, FASTER, interval=(4, 9))]
    with pytest.raises(ValueError, match="overlap"):
        build_entries([*(decided(size, ALL, FASTER) for size in (2, 4, 8, 9)), *overlapping])


def test_no_route_without_a_safe_verdict_a_bound_and_both_errors() -> None:
    good = decided(1, ALL, FASTER)
    safe = good.verdict
    assert safe is not None
    with pytest.raises(ValueError, match="no safe verdict"):
        replace(good, verdict=None)
    for verdict in (Verdict(Status.UNSAFE, FailureKind.CRASH), Verdict(Status.UNPROVEN)):
        with pytest.raises(ValueError, match="no safe verdict"):
            replace(good, verdict=verdict)
    with pytest.raises(ValueError, match="no measured error"):
        replace(good, verdict=replace(safe, worst_error=None))
    with pytest.raises(ValueError, match="no measured error"):
        replace(good, fallback_error=None)
    for low in (None, 1.0, float("nan")):
        with pytest.raises(ValueError, match="no proven bound"):
            replace(good, decision=replace(FASTER, speedup_low=low))
    with pytest.raises(ValueError, match="is the fallback itself"):
        replace(good, fallback=samples.SPLIT)


def test_a_bound_is_never_rounded_up() -> None:
    for low in (1.00001, 1.02999, 1.12345678, 17.0):
        (entry,) = build_entries([decided(1, ALL, replace(FASTER, speedup_low=low))])
        shown = entry.speedup.low[0][0]
        assert shown is not None
        assert 1.0 < shown <= low


def test_proof_sums_columns_once_and_keeps_the_worst() -> None:
    cells = [decided(1, LOW, FASTER), decided(1, HIGH, FASTER)]
    verdict = Verdict(
        Status.SAFE, launches=7, checks=5, worst_error=0.5, requires=("finite_pool",), limits=("logits",)
    )
    cells.append(replace(decided(2, ALL, FASTER), verdict=verdict, fallback_error=0.25))
    (entry,) = build_entries(cells)
    (proof,) = entry.proof
    assert proof == (samples.SPLIT, 5, 107, 0.5, 0.25, ("finite_pool",), ("logits",))


def test_quarantine_withdraws_letters_any_intervals_and_proofs() -> None:
    at = "2026-12-01T00:00:00Z"

    def withdrawn(item: Quarantine) -> RoutingTable:
        return samples.table_of(samples.sample_cells(), quarantine=[item])

    one = withdrawn(Quarantine(samples.SPLIT, "x", at, batch_size=3))
    assert [row.letters for row in one.entries[0].routes.rows] == [".sss", "ssss"]
    assert one.entries[0].eager is not None
    assert [row.letters for row in one.entries[0].eager.routes.rows] == ["q!", "qs"]
    edge = withdrawn(Quarantine(samples.SPLIT, "x", at, batch_size=4))
    assert edge.entries[0].routes.any == ".sqs"
    assert edge.entries[0].eager is not None
    assert edge.entries[0].eager.routes.any == "q!"
    everything = withdrawn(Quarantine(samples.SPLIT, "x", at))
    assert everything.entries[0].routes.any == "qqqq"
    # no ratio of the withdrawn route is one of the fallback that answers now; others stay
    (before,), (after,) = samples.sample().entries, everything.entries
    letters = [
        zip(old.letters, new.letters, strict=True)
        for old, new in zip(before.routes.rows, after.routes.rows, strict=True)
    ]
    for pairs, was, now in zip(letters, before.speedup.vs_stock, after.speedup.vs_stock, strict=True):
        for (old, new), ratio, kept in zip(pairs, was, now, strict=True):
            assert kept == (ratio if old == new else None)
    assert any(ratio is not None for row in before.speedup.vs_stock for ratio in row)
    assert everything.entries[0].proof == ()
    for item in (
        Quarantine(samples.OTHER, "x", at),
        Quarantine(samples.SPLIT, "x", at, shape=samples.OTHER_SHAPE),
        Quarantine(samples.SPLIT, "x", at, q_len=5),
    ):
        assert withdrawn(item).entries == samples.sample().entries


@given(samples.cell_lists())
@settings(max_examples=30, deadline=None)
def test_quarantine_is_complete_and_idempotent(cells: list[DecidedCell]) -> None:
    item = Quarantine(samples.SPLIT, "x", "2026-12-01T00:00:00Z")
    table = apply_quarantine(replace(samples.table_of(cells), quarantine=(item,)))
    validate(table)
    assert apply_quarantine(table) == table
    letters = {letter for e in table.entries for g in e.grids for row in g.rows for letter in row.letters}
    assert not any(table.legend[letter] == samples.SPLIT for letter in letters)


def test_a_route_without_a_family_is_refused() -> None:
    with pytest.raises(TableError, match="families"):
        build_table(
            samples.sample_cells(),
            facts=samples.FACTS,
            generated=samples.GENERATED,
            policy=samples.POLICY,
            families={},
        )


def test_cells_of_engines_that_pad_differently_share_no_table() -> None:
    one, zero = (decided(1, (4, 4096), samples.FASTER, pad_value=pad) for pad in (1, 0))
    other = decided(2, (4, 4096), samples.FASTER, pad_value=0)
    with pytest.raises(ValueError, match="pad_value 0 and 1 cannot share a table"):
        build_entries([one, other])
    with pytest.raises(ValueError, match="proven with pad_value 0; engine generic pads with 1"):
        samples.table_of([zero])
    table = samples.table_of([zero], policy=samples.POLICY._replace(pad_value=0))
    assert load_table(dump_table(table)).policy.pad_value == 0


def test_legend_letters_are_stable_and_never_reserved() -> None:
    known = build_legend(["xqa-decode", "torch-splitkv"])
    assert (known["d"], known["s"]) == ("xqa-decode", "torch-splitkv")
    many = [f"vendor-{index}" for index in range(40)]
    legend = build_legend([*many, "xqa-decode", "fa2"])
    assert {legend[letter] for letter in legend if letter not in RESERVED} == {*many, "xqa-decode", "fa2"}
    assert (legend["d"], legend["a"]) == ("xqa-decode", "fa2")
    assert {letter: legend[letter] for letter in RESERVED} == RESERVED
    for name in ("fallback", "stock", "any", "", "a b", "x" * 65, "-x"):
        with pytest.raises(ValueError, match="route's name"):
            build_legend([name])
    with pytest.raises(ValueError, match="no letter is left"):
        build_legend(f"vendor-{index}" for index in range(70))


def test_agree_prefers_the_gravest_reason() -> None:
    assert agree("sss") == "s"
    assert agree("sa") == "."
    assert agree("s.") == "."
    assert agree("s?.") == "?"
    assert agree("q?x.s") == "q"
    assert agree("!q") == "!"
    assert agree("#!") == "#"
    assert agree("") == "?"
