from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings

from autotune.table.build import DecidedCell
from autotune.table.dump import dump_table, write_table
from autotune.table.errors import TableError, TableWriteError
from autotune.table.load import load_table
from autotune.table.model import Quarantine
from tests.table import samples


@given(samples.cell_lists())
@settings(max_examples=60, deadline=None)
def test_any_table_survives_the_file_and_its_bytes_are_stable(cells: list[DecidedCell]) -> None:
    table = samples.table_of(cells)
    data = dump_table(table)
    loaded = load_table(data)
    assert loaded == table
    assert dump_table(loaded) == data
    assert data.endswith(f'digest: "{loaded.digest}"\n'.encode())


def test_a_cuda_table_with_a_quarantine_survives_too() -> None:
    item = Quarantine(
        samples.SPLIT, "crash in production", "2026-12-01T00:00:00Z", samples.SHAPE, samples.DTYPES, 4, 2
    )
    table = samples.table_of(samples.sample_cells(), facts=samples.CUDA_FACTS, quarantine=[item])
    assert load_table(dump_table(table)) == table
    assert table.entries[0].routes.any == ".qss"


def test_strings_that_look_like_something_else_stay_strings() -> None:
    data = dump_table(samples.sample())
    table = load_table(data)
    assert table.generated.study == "0123"
    assert table.generated.at == "2026-11-29T12:00:00Z"
    assert table.facts.software["torch_commit"] == "1e5"
    assert table.facts.informative["at"] == "2026-01-01"
    # Any other YAML reader sees the same strings: they are quoted in the file.
    foreign = yaml.safe_load(data)
    assert foreign["generated"]["study"] == "0123"
    assert foreign["generated"]["at"] == "2026-11-29T12:00:00Z"
    assert foreign["software"]["torch_commit"] == "1e5"
    assert foreign["generated"]["informative"]["turbo"] is True


def test_a_person_can_review_it() -> None:
    lines = dump_table(samples.sample()).decode().splitlines()
    assert '    "1024": ".sss"' in lines
    assert '    "4096": "ssss"' in lines
    assert '    "any": ".sss"' in lines
    assert "  batch_size: [1, 2, 4, 8]" in lines
    assert '  dtypes: {q: "bf16", kv: "bf16", out: "bf16"}' in lines
    assert lines[0] == 'schema: "autotune/routing-table/1"'
    assert not any("&" in line or "*" in line for line in lines)


def test_an_inconsistent_table_is_not_written(tmp_path: Path) -> None:
    table = samples.sample()
    broken = replace(table, entries=(replace(table.entries[0], proof=()),))
    with pytest.raises(TableError, match="has no proof"):
        write_table(broken, tmp_path / "table.yaml")
    assert list(tmp_path.iterdir()) == []


def test_write_replaces_whole_files_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text("old")
    digest = write_table(samples.sample(), path)
    assert load_table(path).digest == digest
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_write_follows_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "table.yaml"
    link.symlink_to(tmp_path / "real" / "table.yaml")
    write_table(samples.sample(), link)
    assert link.is_symlink()
    load_table(tmp_path / "real" / "table.yaml")


def test_write_errors_are_one_line_and_keep_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    plain = tmp_path / "plain"
    plain.write_text("")
    for path in (
        folder,
        fifo,
        plain / "table.yaml",
        tmp_path / "no" / "table.yaml",
        Path("/proc/table.yaml"),
    ):
        with pytest.raises(TableWriteError) as caught:
            write_table(samples.sample(), path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [fifo, folder, plain]


_FULL_DISK = """
import resource, sys
from autotune.table.dump import write_table
from autotune.table.errors import TableWriteError
from tests.table import samples
resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
try:
    write_table(samples.sample(), sys.argv[1])
except TableWriteError as error:
    print(error)
"""


def test_a_write_that_stops_halfway_leaves_the_old_file(tmp_path: Path) -> None:
    """A file size limit makes the kernel cut the write short, as a full disk would."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 512
    path = tmp_path / "table.yaml"
    path.write_text("old")
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(path)],
        cwd=root,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
    )
    assert "cannot write the table: File too large" in child.stdout
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_rewrite_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    before = os.umask(0o077)
    try:
        write_table(samples.sample(), path)
        assert path.stat().st_mode & 0o777 == 0o600  # a new file: the umask's
        path.chmod(0o644)
        write_table(samples.sample(), path)
        assert path.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_a_lone_surrogate_is_escaped() -> None:
    item = Quarantine(samples.SPLIT, "bad \udcff", "2026-12-01T00:00:00Z")
    table = samples.table_of(samples.sample_cells(), quarantine=[item])
    (found,) = load_table(dump_table(table)).quarantine
    assert found.reason == "bad \\udcff"
