"""How long recorded work took, against times worked out by hand."""

from __future__ import annotations

import pytest

from autotune.replay.seconds import LAUNCH_S, STRETCH_S, check_seconds, chunk_seconds


def test_checks_of_one_child_take_what_lies_between_them() -> None:
    # the first has nothing before it: 4 launches at (2 + 3) s / 10 launches
    rows = [("a", 100.0, 4), ("a", 102.0, 5), ("a", 105.0, 5)]
    assert check_seconds(rows) == pytest.approx([2.0, 2.0, 3.0])


def test_children_that_prove_at_once_share_the_time() -> None:
    # a: 98..100, 100..104; b: 98..100, 100..102. From 98 to 102 two at once, from 102 to 104 one alone
    rows = [("a", 100.0, 1), ("b", 100.0, 1), ("b", 102.0, 1), ("a", 104.0, 2)]
    took = check_seconds(rows)
    assert took == pytest.approx([1.0, 1.0, 1.0, 3.0])
    assert sum(took) == pytest.approx(104.0 - 98.0)


def test_a_later_call_counts_no_pause() -> None:
    later = 100.0 + 10 * STRETCH_S
    rows = [("a", 100.0, 2), ("a", 101.0, 2), ("a", later, 4), ("a", later + 1.0, 2)]
    # 2 s / 4 launches in the stretches: 1 s for the first, 2 s for the one after the pause
    assert check_seconds(rows) == pytest.approx([1.0, 1.0, 2.0, 1.0])


def test_a_check_without_neighbours_takes_its_launches() -> None:
    assert check_seconds([("a", 50.0, 10)]) == pytest.approx([10 * LAUNCH_S])


def test_the_order_of_rows_does_not_matter() -> None:
    rows = [("a", 104.0, 2), ("b", 102.0, 1), ("a", 100.0, 1), ("b", 100.0, 1)]
    assert check_seconds(rows) == pytest.approx([3.0, 1.0, 1.0, 1.0])


def test_chunks_begin_where_the_last_row_was_stored() -> None:
    # a proof at 9, the trial at 10, chunks at 11 and 11.5; the next cell's trial at 12, its chunk at 12.25
    took = chunk_seconds({"a": [11.0, 11.5], "b": [12.25]}, [9.0, 10.0, 12.0], {"a": 5.0, "b": 5.0})
    assert took == {"a": [1.0, 0.5], "b": [0.25]}


def test_a_chunk_after_a_pause_takes_the_cells_median_or_the_models_guess() -> None:
    pause = 10 * STRETCH_S
    took = chunk_seconds(
        {"a": [1.0, 1.5, 2.5, 2.5 + pause], "b": [2.5 + 3 * pause]}, [0.5], {"a": 9.0, "b": 7.0}
    )
    assert took == {"a": [0.5, 0.5, 1.0, 0.5], "b": [7.0]}
