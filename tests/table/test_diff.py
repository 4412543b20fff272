from __future__ import annotations

from hypothesis import given, settings

from autotune.table.build import DecidedCell
from autotune.table.diff import diff_tables
from tests.table import samples
from tests.table.samples import FASTER, SLOWER, decided, table_of

ALL = (4, 4096)


@given(samples.cell_lists())
@settings(max_examples=20, deadline=None)
def test_a_table_does_not_differ_from_itself(cells: list[DecidedCell]) -> None:
    assert diff_tables(table_of(cells), table_of(cells)) == ()


def test_a_changed_cell_changes_its_row_and_its_any() -> None:
    old = table_of([decided(1, (4, 1024), FASTER), decided(1, (1025, 4096), FASTER)])
    new = table_of([decided(1, (4, 1024), SLOWER), decided(1, (1025, 4096), FASTER)])
    found = [(c.batch, c.kv_low, c.kv_high, c.before, c.after) for c in diff_tables(old, new)]
    assert found == [
        (1, None, None, "torch-splitkv", "fallback"),
        (1, 4, 1024, "torch-splitkv", "fallback"),
    ]


def test_a_split_row_alone_is_no_change() -> None:
    whole = table_of([decided(1, ALL, FASTER)])
    split = table_of([decided(1, (4, 1024), FASTER), decided(1, (1025, 4096), FASTER)])
    assert diff_tables(whole, split) == ()


def test_meanings_are_compared_not_letters() -> None:
    old = table_of([decided(1, ALL, samples.FASTER_OTHER)])
    new = table_of([decided(1, ALL, FASTER)])
    assert {(c.before, c.after) for c in diff_tables(old, new)} == {("acme-decode", "torch-splitkv")}


def test_places_that_come_and_go() -> None:
    old, new = table_of([decided(1, ALL, FASTER)]), table_of([decided(2, ALL, FASTER)])
    found = {(c.batch, c.before, c.after) for c in diff_tables(old, new)}
    assert found == {(1, "torch-splitkv", None), (2, None, "torch-splitkv")}


def test_intervals_are_compared_too() -> None:
    ends = [decided(2, ALL, FASTER), decided(4, ALL, FASTER)]
    old = table_of([*ends, decided(3, ALL, FASTER, interval=(2, 4))])
    new = table_of([*ends, decided(3, ALL, SLOWER, interval=(2, 4))])
    assert {c.batch for c in diff_tables(old, new)} == {(2, 4)}
