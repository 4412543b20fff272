"""The script that makes a recording small: what it keeps, and what it says of files that are none."""

from __future__ import annotations

import importlib.util
import lzma
from pathlib import Path

import pytest

from autotune.replay.read import read_recording

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "thin_evidence.py"
EVIDENCE = ROOT / "tests" / "data" / "h200-evidence.db.xz"


def main(arguments: list[str]) -> int:
    """The script's, without a process that imports torch first."""
    spec = importlib.util.spec_from_file_location("thin_evidence", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return int(module.main(arguments))


def test_a_thinned_file_thinned_again_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "again.db"
    assert main([str(EVIDENCE), str(target)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    again = read_recording(target, lambda offers: offers[0][0])
    first = read_recording(EVIDENCE, lambda offers: offers[0][0])
    counts = f"{len(first.cells)} cells, {len(first.decisions)} decided, {len(first.checks)} checks"
    assert counts in said.out
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
    content: bytes | None,
    flags: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "in.db"
    source.write_bytes(EVIDENCE.read_bytes() if content is None else content)
    assert main([str(source), str(tmp_path / "out.db"), *flags]) == 1
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out.db").exists()
