from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Children unpickle the jobs of these tests by module name.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autotune.worker.worker import Worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cpu", step_timeout_s=20.0) as worker:
        yield worker
