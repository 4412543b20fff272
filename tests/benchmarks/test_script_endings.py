"""How the scripts that read recorded rounds end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BODY = """
from benchmarks.recorded import RecordedError, ended
def run():
    print("a line of some length\\n" * 100_000)
raise SystemExit(ended(run, "script"))
"""


def test_a_reader_that_has_gone_is_no_failure() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BODY], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout and process.stderr
    assert process.stdout.readline() == b"a line of some length\n"
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (0, b"")
    process.stderr.close()
