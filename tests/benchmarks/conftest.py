from __future__ import annotations

import sys
from pathlib import Path

# benchmarks is no installed package, nor are the tests that helpers are shared with
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
