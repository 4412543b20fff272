"""The script that makes a recording small: what it keeps, and what it says of files that are none."""

from __future__ import annotations

import lzma
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.replay.read import read_recording

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "tests" / "data" / "h200-evidence.db.xz"


def thin(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "thin_evidence.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_thinned_file_thinned_again_is_the_same(tmp_path: Path) -> None:
    target = tmp_path / "again.db"
    done = thin(EVIDENCE, target)
    assert (done.returncode, done.stderr) == (0, "")
    again = read_recording(target, lambda offers: offers[0][0])
    first = read_recording(EVIDENCE, lambda offers: offers[0][0])
    counts = f"{len(first.cells)} cells, {len(first.decisions)} decided, {len(first.checks)} checks"
    assert counts in done.stdout
    assert (again.study, again.cells, again.checks) == (first.study, first.cells, first.checks)
    assert (again.timings, again.decisions) == (first.timings, first.decisions)
    assert [path.name for path in tmp_path.iterdir()] == ["again.db"]


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        (b"no database", (), "is neither an SQLite database"),
        (lzma.compress(b"no database"), (), "holds no SQLite database"),
        (None, ("--study", "0123"), "name one of its studies with --study: 069c0888a5b2"),
    ],
)
def test_what_it_cannot_thin_is_one_line(
    content: bytes | None, flags: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    source = tmp_path / "in.db"
    source.write_bytes(EVIDENCE.read_bytes() if content is None else content)
    done = thin(source, tmp_path / "out.db", *flags)
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out.db").exists()
