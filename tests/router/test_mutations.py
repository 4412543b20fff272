"""Damaged table files, a few hundred of those that ``benchmarks/mutations.py`` makes 100,000 of."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.table import load
from benchmarks import mutations


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("autotune.router")
    level = logger.level
    yield
    logger.setLevel(level)


def test_damaged_files_do_no_harm() -> None:
    found = mutations.run(600, seed=1)
    assert found["wrong"] == []
    assert isinstance(found["in use"], int)
    assert found["in use"] > 3  # edited and signed again, some are still tables: their answers were compared


def test_the_examination_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = mutations.seeds()[0]
    body = seed.data[: seed.data.rindex(b"digest: ")]
    edited = body.replace(b"qwen", b"QWEN") + seed.data[len(body) :]
    path = tmp_path / "table.yaml"
    assert mutations.examine(path, seed, seed.data) == ("", True)
    assert mutations.examine(path, seed, edited) == ("", False)

    def credulous(data: bytes) -> tuple[str, str]:
        text = data[: data.rindex(b"digest: ")].decode()
        return text, "sha256:" + "0" * 64

    monkeypatch.setattr(load, "open_signed", credulous)
    problem, active = mutations.examine(path, seed, edited)
    assert active
    assert "although its digest does not fit" in problem
    monkeypatch.undo()
    monkeypatch.setattr(mutations, "read_by_eye", lambda *args: None)
    assert "the letters say otherwise" in mutations.examine(path, seed, seed.data)[0]


def test_every_kind_of_damage_is_made() -> None:
    seed = mutations.seeds()[0]
    stream = mutations.mutations(seed.data, random.Random(2))
    made = [next(stream) for _ in range(300)]
    signed = sum(mutations.intact(data) for data in made)
    assert 30 < signed < 150
    assert len({len(data) for data in made}) > 50
