"""Plans: intervals written out or searched, and what a reload and a quarantine make of any table."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.router import Router, plan
from autotune.router.status import ACTIVE, RouterStatus
from autotune.table.build import DecidedCell
from autotune.table.dump import dump_table, write_table
from autotune.table.load import load_table
from autotune.table.model import Quarantine, RoutingTable
from autotune.table.withdraw import withdraw
from tests.table import samples
from tests.table.samples import DTYPES, FALLBACK, FASTER, SHAPE, SPLIT, decided

QUERIES = [
    (batch, q_len, kv) for batch in range(-1, 19) for q_len in (1, 4) for kv in (None, 1, 4, 300, 4096)
]
BINDS = [(shape, context) for shape in (SHAPE, samples.OTHER_SHAPE) for context in (300, 4096)]


def answers(router: Router) -> list[tuple[str, bool, str | None]]:
    found = []
    for shape, context in BINDS:
        bound = router.bind(shape, DTYPES, max_context=context, attests=["finite_pool"])
        found += [(bound.route(*q), bound.use_decode(*q), bound.proven(*q)) for q in QUERIES]
    return found


def router_of(table: RoutingTable) -> Router:
    loaded = load_table(dump_table(table))
    return Router(loaded, RouterStatus(ACTIVE, "", "", loaded.digest), "fallback")


@given(samples.cell_lists())
@settings(max_examples=25, deadline=None)
def test_an_interval_answers_alike_written_out_and_searched(cells: list[DecidedCell]) -> None:
    table = samples.table_of(cells)
    written_out = answers(router_of(table))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_WRITTEN_OUT", 0)
        assert answers(router_of(table)) == written_out


@given(st.sets(st.integers(4, 5000), min_size=1, max_size=6), st.data())
@settings(max_examples=40, deadline=None)
def test_every_kv_length_is_answered_from_its_octave_as_by_search(
    ends: set[int], data: st.DataObject
) -> None:
    """``route`` and ``use_decode`` index by octave first, ``explain`` searches whole rows."""
    cells, low, context = [], 4, max(ends)
    for end in sorted(ends):
        decision = data.draw(st.sampled_from((FASTER, samples.FASTER_OTHER, samples.SLOWER)))
        cells.append(decided(1, (low, end), decision, max_context=context))
        low = end + 1
    max_context = data.draw(st.integers(4, context))
    bound = router_of(samples.table_of(cells)).bind(SHAPE, DTYPES, max_context=max_context)
    edges = {
        each + off for each in (*ends, *(1 << k for k in range(15)), max_context) for off in (-2, -1, 0, 1)
    }
    for kv in sorted(edges | {-4096, -5, -1, 0, 10**30}):
        found = bound.explain(1, 4, kv)
        assert (bound.route(1, 4, kv), bound.use_decode(1, 4, kv)) == (found.answer, found.use_decode), kv
        inside = next((cell for cell in cells if cell.cell.kv_low <= kv <= cell.cell.kv_high), None)
        wanted = inside.decision.route if inside and kv <= max_context else None
        assert bound.proven(1, 4, kv) == wanted
        assert bound.route(1, 4, kv) == (wanted or FALLBACK)


def test_octaves_of_rows_that_end_at_powers_of_two_need_no_search() -> None:
    cells = [decided(1, (4, 1024), FASTER), decided(1, (1025, 4096), samples.SLOWER)]
    bound = router_of(samples.table_of(cells)).bind(SHAPE, DTYPES, max_context=4096)
    slot = bound._plan.sizes[4][1]
    # lengths 3 and 4: only one of them is a length that this q_len can have
    assert slot[8] == (None, None, None, *([SPLIT] * 8), FALLBACK, FALLBACK)
    assert slot[9] == (None, None, None, *([True] * 8), False, False)
    cut = router_of(samples.table_of(cells)).bind(SHAPE, DTYPES, max_context=700)
    assert cut._plan.sizes[4][1][8] == (None, None, None, *([SPLIT] * 7), None)
    assert [cut.route(1, 4, kv) for kv in (512, 513, 700, 701)] == [SPLIT, SPLIT, SPLIT, FALLBACK]


def test_a_wide_interval_is_searched() -> None:
    wide = (8, 8 + 5000)
    cells = [decided(size, (4, 4096), FASTER) for size in wide]
    cells.append(decided(3000, (4, 4096), FASTER, interval=wide))
    bound = router_of(samples.table_of(cells)).bind(SHAPE, DTYPES, max_context=4096)
    calls = (7, 8, 9, 5007, 5008, 5009)
    assert [bound.route(size, 4, 100) for size in calls] == [FALLBACK, SPLIT, SPLIT, SPLIT, SPLIT, FALLBACK]
    assert [bound.use_decode(size, 4) for size in calls] == [False, True, True, True, True, False]


@given(samples.cell_lists(), samples.cell_lists())
@settings(max_examples=25, deadline=None)
def test_a_reloaded_router_answers_as_a_fresh_one(old: list[DecidedCell], new: list[DecidedCell]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.yaml"
        write_table(samples.table_of(old), path)
        router = Router.load(path, facts=samples.FACTS)
        bounds = [
            (router.bind(shape, DTYPES, max_context=context, attests=["finite_pool"]), shape, context)
            for shape, context in BINDS
        ]
        before = router.digest
        write_table(samples.table_of(new), path)
        assert router.poll(min_interval_s=0.0) is (Router.load(path, facts=samples.FACTS).digest != before)
        fresh = Router.load(path, facts=samples.FACTS)
    for bound, shape, context in bounds:
        other = fresh.bind(shape, DTYPES, max_context=context, attests=["finite_pool"])
        assert [bound.explain(*query) for query in QUERIES] == [other.explain(*query) for query in QUERIES]


@given(
    samples.cell_lists(),
    st.sampled_from((SPLIT, samples.OTHER)),
    st.sampled_from((None, SHAPE)),
    st.sampled_from((None, 1, 4)),
    st.sampled_from((None, 1, 2, 3, 8)),
)
@settings(max_examples=40, deadline=None)
def test_a_withdrawn_route_is_never_named_where_it_was_withdrawn(
    cells: list[DecidedCell], route: str, shape: object, q_len: int | None, batch: int | None
) -> None:
    table = samples.table_of(cells)
    item = Quarantine(route, "x", "2026-12-01T00:00:00Z", SHAPE if shape else None, None, q_len, batch)
    withdrawn = withdraw(table, [item])
    assert load_table(dump_table(withdrawn)) == withdrawn
    before, after = router_of(table), router_of(withdrawn)
    for other, context in BINDS:
        old, new = (
            router.bind(other, DTYPES, max_context=context, attests=["finite_pool"])
            for router in (before, after)
        )
        for query in QUERIES:
            here = shape in (None, other) and q_len in (None, query[1]) and batch in (None, query[0])
            if here:
                assert new.route(*query) != route
            # and nothing that was not named before is named now
            assert new.proven(*query) in (None, old.proven(*query))
