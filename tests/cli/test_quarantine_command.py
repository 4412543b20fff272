"""``autotune quarantine``: a route goes from a table, at once and in later exports."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune.router import Router
from autotune.store.database import open_database
from autotune.store.repository import Repository
from autotune.table import dump
from autotune.table.dump import write_table
from autotune.table.load import load_table
from tests.console import Place, Result, cli
from tests.table import samples
from tests.table.samples import DTYPES, FALLBACK, FASTER, SHAPE, SPLIT, decided


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.yaml"
    other = [decided(2, (4, 4096), FASTER, shape=samples.OTHER_SHAPE), decided(2, (8, 4096), FASTER, q_len=8)]
    write_table(samples.table_of([*samples.sample_cells(), *other]), path)
    return path


def quarantine(table: Path, *more: object) -> Result:
    return cli("quarantine", table, "--route", SPLIT, "--why", "it crashed", "--by", "Ada", *more)


def test_everywhere(table: Path) -> None:
    router = Router.load(table, facts=samples.FACTS)
    bound = router.bind(SHAPE, DTYPES, max_context=4096)
    before = load_table(table)
    result = quarantine(table, "--json")
    assert result.code == 0, result.err
    after = load_table(table)
    assert result.json["digest"] == after.digest != before.digest == result.json["before"]
    (item,) = after.quarantine
    assert (item.route, item.reason) == (SPLIT, "it crashed (signed off by Ada)")
    assert (item.shape, item.dtypes, item.q_len, item.batch_size) == (None, None, None, None)
    named = sum(
        letter == "s" for e in before.entries for g in e.grids for r in g.rows for letter in r.letters
    )
    assert result.json["cells"] == named > 0
    assert not [e for e in after.entries if e.proof]
    assert bound.route(2, 4) == SPLIT
    assert router.poll(min_interval_s=0.0)
    assert (bound.route(2, 4), bound.explain(2, 4, 9).why) == (FALLBACK, "quarantined")


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--batch", "2"], {(2, 4): FALLBACK, (4, 4): SPLIT, (3, 4): FALLBACK, (2, 8): FALLBACK}),
        (["--batch", "3"], {(2, 4): SPLIT, (4, 4): SPLIT, (3, 4): FALLBACK, (2, 8): SPLIT}),
        (["--q-len", "8"], {(2, 4): SPLIT, (4, 4): SPLIT, (3, 4): SPLIT, (2, 8): FALLBACK}),
        (
            ["--q-len", "4", "--batch", "2,4"],
            {(2, 4): FALLBACK, (4, 4): FALLBACK, (8, 4): SPLIT, (2, 8): SPLIT},
        ),
        (["--heads", "8/1/128", "--dtype", "bf16"], {(2, 4): FALLBACK, (2, 8): FALLBACK}),
    ],
)
def test_a_part(table: Path, flags: list[str], left: dict[tuple[int, int], str]) -> None:
    assert quarantine(table, *flags).code == 0
    bound = Router.load(table, facts=samples.FACTS).bind(SHAPE, DTYPES, max_context=4096)
    assert {call: bound.route(*call, 2000) for call in left} == left


def test_again_replaces_the_reason_and_keeps_the_others(table: Path) -> None:
    assert quarantine(table, "--batch", "2").code == 0
    assert quarantine(table, "--batch", "4").code == 0
    assert (
        cli("quarantine", table, "--route", SPLIT, "--why", "newer", "--by", "Bob", "--batch", "2").code == 0
    )
    found = {item.batch_size: item.reason for item in load_table(table).quarantine}
    assert found == {4: "it crashed (signed off by Ada)", 2: "newer (signed off by Bob)"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--route", "no-such", "--why", "x"], f"names {FALLBACK}, {SPLIT}"),
        (["--route", SPLIT, "--why", " "], "--why"),
        (["--route", SPLIT, "--why", "x", "--heads", "8/1"], "8/1/128"),
        (["--route", SPLIT, "--why", "x", "--heads", "16/1/128"], "it has 8/1/128 bf16"),
        (["--route", SPLIT, "--why", "x", "--dtype", "int3"], "there are"),
        (["--route", SPLIT, "--why", "x", "--dtype", "fp8"], "no entry"),
        (["--route", SPLIT, "--why", "x", "--q-len", "5"], "has no q_len 5 in these entries; it has 4, 8"),
        (["--route", SPLIT, "--why", "x", "--batch", "9"], "has no batch_size 9"),
        (["--route", SPLIT, "--why", "x", "--batch", "two"], "--batch two"),
        (["--route", SPLIT, "--why", "x", "--batch", "-1"], "--batch -1"),
    ],
)
def test_what_it_refuses_changes_nothing(table: Path, flags: list[str], said: str) -> None:
    before = table.read_bytes()
    result = cli("quarantine", table, *flags)
    assert result.code == 2
    assert said in result.line
    assert table.read_bytes() == before
    assert [path.name for path in table.parent.iterdir()] == [table.name]


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    assert quarantine(tmp_path / "absent").code == 2
    (tmp_path / "odd").write_text("x")
    assert "last line" in quarantine(tmp_path / "odd").line


def test_a_database_that_is_not_there(table: Path) -> None:
    before = table.read_bytes()
    result = quarantine(table, "--db", f"sqlite:///{table.parent}/typo.db")
    assert result.code == 1
    assert "no such database" in result.line
    assert table.read_bytes() == before


def test_a_signature_that_no_longer_fits_is_said(table: Path) -> None:
    table.with_name("table.yaml.sig").write_text("ed25519:x\n")
    result = quarantine(table)
    assert result.code == 0
    assert "no longer fits" in result.line


def test_the_database_notes_columns(table: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/evidence.db"
    with open_database(url):
        pass
    result = quarantine(table, "--batch", "2,3", "--q-len", "4", "--db", url, "--json")
    assert result.code == 0, result.err
    with open_database(url) as database:
        repository = Repository(database)
        rows = repository.quarantined(repository.register_fingerprint(samples.FACTS))
    found = {(row.column.shape.window_left, row.column.batch_size, row.column.interval) for row in rows}
    assert found == {(-1, 2, None), (-1, 3, (2, 4)), (512, 2, None)}
    assert len(rows) == result.json["columns_noted"] == 3
    assert {row.reason for row in rows} == {"it crashed (signed off by Ada)"}


def test_an_export_keeps_it(done: Place) -> None:
    assert cli("export", *done.flags()).code == 0
    loaded = load_table(done.table)
    (entry,) = loaded.entries
    cells = [
        decided(
            size,
            (entry.q_len, entry.max_context),
            FASTER,
            q_len=entry.q_len,
            shape=entry.shape,
            dtypes=entry.dtypes,
            max_context=entry.max_context,
            pad_value=loaded.policy.pad_value,
        )
        for size in entry.batch_size
    ]
    # A table that names the route whatever this machine measured.
    named = done.folder / "named.yaml"
    write_table(samples.table_of(cells, facts=loaded.facts, policy=loaded.policy), named)
    assert quarantine(named, "--db", done.url).code == 0
    assert cli("export", *done.flags()).code == 0
    again = load_table(done.table)
    assert {(item.batch_size, item.reason) for item in again.quarantine} == {
        (size, "it crashed (signed off by Ada)") for size in entry.batch_size
    }
    letters = {letter for e in again.entries for g in e.grids for row in g.rows for letter in row.letters}
    assert "s" not in letters


def test_text_that_is_not_utf8_leaves_a_table_that_loads(table: Path) -> None:
    flags = ["--route", SPLIT, "--why", "bad \udcff", "--by", "A\ud800\x07"]
    result = cli("quarantine", table, *flags, "--json")
    assert result.code == 0, result.err
    (item,) = load_table(table).quarantine
    assert item.reason == "bad \\udcff (signed off by A\\ud800\x07)"


def test_two_at_once_lose_none(table: Path) -> None:
    command = [sys.executable, "-m", "autotune.cli.main", "quarantine", str(table), "--route", SPLIT]
    with _held(table.parent):
        running = [
            subprocess.Popen([*command, "--why", "x", "--by", "Ada", "--batch", size], stdout=subprocess.PIPE)
            for size in ("2", "4")
        ]
        deadline = time.monotonic() + 120
        while not all(_opened(table.parent, process.pid) for process in running):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not load_table(table).quarantine
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert {item.batch_size for item in load_table(table).quarantine} == {2, 4}


def _opened(folder: Path, pid: int) -> bool:
    try:
        return any(os.path.realpath(entry) == str(folder) for entry in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:  # ended already: exit codes say how
        return False


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_a_disk_that_fills_up_after_the_database(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/evidence.db"
    with open_database(url):
        pass

    def full(target: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dump, "_replace", full)
    before = table.read_bytes()
    result = quarantine(table, "--batch", "2", "--q-len", "4", "--db", url)
    assert result.code == 1
    assert "No space left" in result.line
    assert "2 columns stay noted in the database" in result.line
    assert "stay noted" not in quarantine(table).line
    assert table.read_bytes() == before


def test_a_batch_size_under_another_q_len_is_refused(table: Path) -> None:
    before = table.read_bytes()
    result = quarantine(table, "--q-len", "8", "--batch", "4")
    assert result.code == 2
    assert "has no batch_size 4 with q_len 8 in these entries; it has 2" in result.line
    assert table.read_bytes() == before


def test_a_route_that_is_only_a_fallback(table: Path) -> None:
    router = Router.load(table, facts=samples.FACTS, fallback="mine")
    bound = router.bind(SHAPE, DTYPES, max_context=4096)
    result = cli("quarantine", table, "--route", FALLBACK, "--why", "x", "--by", "Ada", "--batch", "2")
    assert result.code == 0, result.err
    assert router.poll(min_interval_s=0.0)
    found = bound.explain(2, 4, 2000)
    assert (found.answer, found.proven, found.why) == ("mine", False, "no_safe_route")
    assert FALLBACK in found.detail
    assert "quarantined" in found.detail
    assert [bound.route(1, 4, 9), bound.route(1, 4, 2000), bound.route(77, 4)] == [FALLBACK, SPLIT, "mine"]
    assert bound.explain(3, 4, 2000).why == "no_safe_route"  # the interval around it
    assert cli("quarantine", table, "--route", FALLBACK, "--why", "x", "--by", "Ada").code == 0
    assert router.poll(min_interval_s=0.0)
    assert {bound.route(size, 4, kv) for size in (1, 2, 3, 4, 8, 77) for kv in (None, 9, 2000)} == {"mine"}
    assert not bound.use_decode(4, 4)
