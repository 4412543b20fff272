from __future__ import annotations

import sys
from pathlib import Path

# the tests are no installed package
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.places import done, finished, place, tested

__all__ = ["done", "finished", "place", "tested"]
