from __future__ import annotations

import sys
from pathlib import Path

# tests.console and tests.tuner.scripted are shared with other folders
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
