"""Commands that only read import neither torch nor, where no database is opened, SQLAlchemy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.console import TINY, Place, Result

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "optuna", "sqlalchemy", "flashinfer")
H200 = [str(ROOT / "tuned_configs" / f"nvidia-h200.{engine}.yaml") for engine in ("sglang", "generic")]
CALL = ["--heads", "8/1/128", "--batch", "8", "--q-len", "4", "--kv", "1000", "--facts", "table"]

_CODE = f"""
import json, sys
from autotune.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    found = [name for name in {HEAVY!r} if name in sys.modules]
    sys.stderr.write("\\n" + json.dumps([int(end.code or 0), found]))
"""


def imported(*arguments: str) -> tuple[int, set[str]]:
    """The exit code of a command in a fresh interpreter, and what it imported of the heavy packages."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    code, found = json.loads(done.stderr.splitlines()[-1])
    return int(code), set(found)


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", H200[0]],
        ["explain", H200[0], *CALL],
        ["diff", *H200],
        ["plan", "--gpu", "h200"],
        ["plan", "--space", str(TINY)],
        ["verify", "--help"],
        ["run", "--help"],
    ],
    ids=lambda arguments: " ".join(Path(each).name for each in arguments[:3]),
)
def test_what_opens_no_database_is_light(arguments: list[str]) -> None:
    assert imported(*arguments) == (0, set())


def test_an_export_of_a_stored_study_imports_no_torch(done: Place, finished: tuple[Place, Result]) -> None:
    before = done.count("export")
    code, found = imported("export", *done.flags())
    assert code == 0 and done.count("export") == before + 1
    assert found == {"sqlalchemy"}
    assert imported("show", str(done.table)) == (0, set())
