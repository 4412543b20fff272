"""A cell whose children die without accusing anybody is not tried for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autotune.domain.cell import Cell
from autotune.store.database import Database
from autotune.store.records import MOST_LOST_CHUNKS, Study, TrialState
from autotune.store.repository import Repository


def test_losses_are_counted_over_attempts_and_processes(database: Database, study: Study, cell: Cell) -> None:
    for attempt in range(MOST_LOST_CHUNKS):
        repository = Repository(database)  # as after a restart
        trial = repository.begin_trial(study, cell, attempt, attempt)
        assert (trial.lost, trial.given_up) == (attempt, False)
        trial = repository.lose_chunk(study, cell)
        assert (trial.lost, trial.retries, trial.state) == (attempt + 1, attempt, TrialState.RUNNING)
        assert trial == repository.trials(study)[cell.id]
        repository.finish_trial(study, cell, TrialState.FAILED)
    assert trial.given_up
    assert repository.begin_trial(study, cell, 9, 9).given_up
    assert repository.trials(study)[cell.id].given_up


def test_kills_and_retries_are_no_losses(repository: Repository, study: Study, cell: Cell) -> None:
    for attempt in range(5):
        trial = repository.begin_trial(study, cell, attempt, attempt)
    assert (trial.kills, trial.retries, trial.lost, trial.given_up) == (4, 4, 0, False)


def test_cells_do_not_share_their_losses(
    repository: Repository, study: Study, cell: Cell, make_cell: Callable[..., Cell]
) -> None:
    other = make_cell(batch_size=8)
    repository.add_cells(study, [(other, [], 1)])
    for each in (cell, other):
        repository.begin_trial(study, each, 0, 0)
    assert repository.lose_chunk(study, cell).lost == 1
    assert repository.trials(study)[other.id].lost == 0


def test_a_cell_without_a_trial_has_no_chunks_to_lose(
    repository: Repository, study: Study, cell: Cell
) -> None:
    with pytest.raises(ValueError, match="no trial"):
        repository.lose_chunk(study, cell)
