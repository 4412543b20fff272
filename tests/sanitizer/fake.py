"""A stand-in for compute-sanitizer: an executable on PATH that prints what it is told, or misbehaves."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = """#!{python}
import json, os, pathlib, subprocess, sys, time
here = pathlib.Path({folder!r})
said = json.loads((here / "says.json").read_text())
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ), "group": os.getpgid(0)}}) + "\\n")
if said["helper"]:
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (here / "helper").write_text(str(helper.pid))
if said["runs"]:
    sys.stdout.write("========= COMPUTE-SANITIZER\\n")
    sys.stdout.flush()
    status = subprocess.run(sys.argv[sys.argv.index(sys.executable):]).returncode
sys.stdout.write(said["output"])
sys.stdout.flush()
for _ in range(said["mebibytes"]):
    os.write(1, b"=" * 1048575 + b"\\n")
time.sleep(said["sleep"])
sys.exit(status if said["runs"] else said["status"])
"""


@dataclass(frozen=True)
class Call:
    """One call of it."""

    argv: list[str]
    env: dict[str, str]
    group: int


@dataclass(frozen=True)
class Fake:
    """The executable in a folder of its own."""

    folder: Path

    @classmethod
    def on_path(cls, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
        """Make it, first on PATH."""
        bin_folder = folder / "fake-bin"
        bin_folder.mkdir()
        fake = cls(bin_folder)
        fake.path.write_text(_SCRIPT.format(python=sys.executable, folder=str(bin_folder)))
        fake.path.chmod(0o755)
        fake.says("")
        monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
        return fake

    @property
    def path(self) -> Path:
        return self.folder / "compute-sanitizer"

    def says(
        self,
        output: str,
        *,
        status: int = 0,
        sleep: float = 0.0,
        mebibytes: int = 0,
        runs: bool = False,
        helper: bool = False,
    ) -> None:
        """What it does from now on: run its program, print ``output``, then a flood, sleep, end.

        Args:
            helper: start a process that outlives it, with its output open.
        """
        what: dict[str, Any] = {
            **{"output": output, "status": status, "sleep": sleep},
            **{"mebibytes": mebibytes, "runs": runs, "helper": helper},
        }
        (self.folder / "says.json").write_text(json.dumps(what))

    @property
    def calls(self) -> list[Call]:
        """Its calls so far."""
        path = self.folder / "calls.jsonl"
        return [Call(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def helper(self) -> int:
        """Pid of the process that it left behind."""
        return int((self.folder / "helper").read_text())
