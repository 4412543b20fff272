"""``autotune suspects``: what a dead process left behind, and what it does not say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.console import cli

DIES = """
import os, sys
from pathlib import Path
from autotune.engines.suspects import Captured
captured = Captured(Path(sys.argv[1]), "sglang", table="/t/h200.yaml", digest="sha256:1")
captured.add("xqa-decode", "batch 8 q_len 4")
captured.add("xqa-decode", "batch 16 q_len 4")
os.kill(os.getpid(), 9)
"""


def test_suspects(tmp_path: Path) -> None:
    nothing = cli("suspects", tmp_path)
    assert (nothing.code, "no process ended badly" in nothing.out) == (0, True)
    root = Path(__file__).parents[2]
    died = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], cwd=root, check=False)
    assert died.returncode == -9
    text = cli("suspects", tmp_path)
    assert text.code == 0
    assert "xqa-decode at batch 8 q_len 4" in text.out
    assert text.out.count("autotune quarantine /t/h200.yaml --route xqa-decode") == 1
    (found,) = cli("suspects", tmp_path, "--json").json["suspects"]
    assert (found["engine"], found["digest"], len(found["routes"])) == ("sglang", "sha256:1", 2)
    assert cli("suspects", tmp_path, "--forget").code == 0
    assert cli("suspects", tmp_path, "--json").json["suspects"] == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = cli("suspects", tmp_path / "absent")
    assert result.code == 2
    assert "AUTOTUNE_STATE" in result.line
