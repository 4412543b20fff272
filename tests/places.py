"""Fixtures of the tests that look at a finished run of the console script; one run serves them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.console import Place, Result, finished_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Result]:
    """An uninterrupted run of the tiny space: its place, which no test may change, and how it ended."""
    return finished_run(lambda: tmp_path_factory.mktemp("finished"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A fresh place."""
    return Place(tmp_path)


@pytest.fixture
def tested(tmp_path: Path, finished: tuple[Place, Result]) -> Place:
    """A fresh place whose database has this machine's self-test."""
    return Place(tmp_path).with_selftest_of(finished[0])


@pytest.fixture
def done(tmp_path: Path, finished: tuple[Place, Result]) -> Place:
    """A copy of the finished run, to change at will."""
    return Place(tmp_path).copy_of(finished[0])
