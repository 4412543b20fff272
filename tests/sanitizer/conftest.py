from __future__ import annotations

import sys
from pathlib import Path

import pytest

# tests.sanitizer.fake is shared with tests/tuner and tests/cli
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sanitizer.fake import Fake


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A compute-sanitizer on PATH that says what the test has it say."""
    return Fake.on_path(tmp_path, monkeypatch)
