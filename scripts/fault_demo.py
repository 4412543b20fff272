# ruff: noqa: T201 - what it prints is its result
"""Faults in the middle of a study: a route that strays, one that hangs, kill -9 of a child and of the run.

    python scripts/fault_demo.py --gpu cpu
    python scripts/fault_demo.py --gpu h200 --routes xqa-decode,fa2 --seconds 240

Runs `autotune run` over a few cells with two more routes, offered as a third party's package: the kernels
that the self-test plants as `narrow-table` and `hang`. While it runs a child is killed, later the run. The
same command is then given again. Every row that was stored before must stand unchanged, nothing may live on,
and the two routes must be unsafe by their own kinds, the others safe. Exit 1 if not. Takes a few minutes: a
hang is one after a minute. After ``--seconds``, or at a signal, both runs are ended, nothing is left behind,
and what the database holds by then is told.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PLUGIN = """
from autotune.routes.base import Capture, Family
from autotune.routes import {module}
from autotune.routes.{module} import {planted}

# the self-test's ends by itself before a run's watchdog takes it for a hang
{module}.{hang}


class _Demo:
    family, capture, deterministic, version = Family.DECODE, Capture.{capture}, True, 1
    needs = frozenset()
    planted = ""

    def supports(self, column, facts):
        return Planted(self.planted).supports(column, facts)

    def open(self, capacity, allocate):
        return Planted(self.planted).open(capacity, allocate)


class Strays(_Demo):
    name, planted = "demo-strays", "{prefix}narrow-table"


class Hangs(_Demo):
    name, planted = "demo-hangs", "{prefix}hang"
"""
# On the GPU 8 requests: their page table is made of whole 16-byte units, so that it ends where its mapping
# does, and the first batch of `ragged_lengths` reads past it. The table of one request has up to 12 bytes of
# canary behind it: the read stays inside, and shows as a NaN.
CELLS = {
    "cpu": ["--batch", "1", "--q-len", "4", "--dtype", "fp32"],
    "gpu": [
        "--models",
        "llama-3.1-70b",
        "--batch",
        "8",
        "--q-len",
        "4",
        "--dtype",
        "bf16",
        "--kv",
        "1024,4096",
    ],
}
# Of --seconds: a run whose budget is spent ends by itself within these.
MARGIN_S = 10
Rows = dict[tuple[str, ...], tuple[str, ...]]


def plugin(folder: Path, device: str) -> None:
    """A package with the two routes, as pip would have installed it."""
    planted = "planted" if device == "cpu" else "planted_cuda"
    text = PLUGIN.format(
        module=planted,
        planted="Planted" if device == "cpu" else "PlantedCuda as Planted",
        hang="HANG_SECONDS = 600" if device == "cpu" else "HANG_NANOSECONDS = 600 * 10**9",
        capture="NO" if device == "cpu" else "FREE",
        prefix="planted-" if device == "cpu" else "planted-cuda-",
    )
    (folder / "demo_routes.py").write_text(text)
    info = folder / "demo_routes-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-routes\nVersion: 0\n")
    entries = "demo-strays = demo_routes:Strays\ndemo-hangs = demo_routes:Hangs\n"
    (info / "entry_points.txt").write_text(f"[autotune.routes]\n{entries}")


def rows(database: Path) -> Rows:
    """Every proof row: its key, and what it says."""
    if not database.exists():
        return {}
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            found = connection.execute(
                "SELECT column_id, cell_id, route, check_name, status, kind, detail, seed, created_at"
                " FROM proof"
            ).fetchall()
        except sqlite3.OperationalError:  # no schema yet
            return {}
    return {tuple(map(str, row[:4])): tuple(map(str, row[4:])) for row in found}


def parent_of(pid: int) -> int | None:
    """The parent of a process that runs; None of one that has ended, whether or not it was waited for."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def descendants(pid: int) -> list[int]:
    """Processes below ``pid``, parents first."""
    below: dict[int, list[int]] = {}
    for each in Path("/proc").glob("[0-9]*"):
        if (parent := parent_of(int(each.name))) is not None:
            below.setdefault(parent, []).append(int(each.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        children = below.get(queue.pop(0), [])
        found += children
        queue += children
    return found


def kill_last(pid: int) -> int:
    """Kill the last of the processes below ``pid``, which is a child at work; returns which it was."""
    for victim in reversed(descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            return victim
    sys.exit("fault_demo: the run has no child to kill")


def until(met: Callable[[], bool], run: subprocess.Popen[bytes], end: float, log: Path) -> None:
    """Wait for ``met`` while ``run`` lives, no longer than to the monotonic time ``end``; ``log`` is its."""
    while not met():
        if run.poll() is not None:
            sys.exit(
                f"fault_demo: the run ended by itself (exit {run.returncode}) before it could be disturbed: "
                f"{last_line(log)}"
            )
        if time.monotonic() > end:
            sys.exit(
                "fault_demo: --seconds are over, and there was nothing to disturb; the run said last: "
                f"{last_line(log)}"
            )
        time.sleep(0.05)


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` in a session of its own; however the block ends, neither it nor a child of it lives on."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        below = descendants(process.pid) if process.poll() is None else []
        process.kill()
        process.wait()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Disturb a study, then finish it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", default="cpu")
    parser.add_argument("--routes", help="the honest routes; all built-in ones of the device if left out")
    parser.add_argument(
        "--keep", type=Path, help="folder for database, table and logs instead of a temporary one"
    )
    parser.add_argument("--seconds", type=float, default=1200.0, help="for everything (1200)")
    options = parser.parse_args()
    # a killed demo must not leave a run on the device: SIGTERM unwinds it as Ctrl-C does
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    device = "cpu" if options.gpu == "cpu" else "gpu"
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        package = Path(scratch) / "site"
        package.mkdir()
        plugin(package, device)
        return disturb(options, folder, package, device)


def disturb(options: argparse.Namespace, folder: Path, package: Path, device: str) -> int:
    """Start, kill a child, kill the run, start again, compare."""
    database = folder / "faults.db"
    known = options.routes or ("torch-sdpa,torch-splitkv" if device == "cpu" else "xqa-decode,fa2")
    command = [sys.executable, "-m", "autotune.cli.main", "run", "--gpu", options.gpu, "--engine", "generic"]
    command += ["--routes", f"{known},demo-strays,demo-hangs", *CELLS[device]]
    command += ["--db", f"sqlite:///{database}", "--out", str(folder)]
    # compute-sanitizer would write what it finds into a row that must stand unchanged
    command += ["--no-sanitizer"]
    paths = [str(package), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    end = time.monotonic() + options.seconds
    before: Rows = {}
    left: list[int] = []
    status: object = "not reached"
    cut = ""
    try:
        log = folder / "first.log"
        with started([*command, "--budget", budget(end)], environment, log) as run:
            until(lambda: len(rows(database)) >= 5, run, end, log)
            victim = kill_last(run.pid)
            seen = len(rows(database))
            until(lambda: len(rows(database)) >= seen + 5, run, end, log)
            below = descendants(run.pid)
            run.kill()
            run.wait()
            deadline = time.monotonic() + 20
            left = below
            try:
                while left := [p for p in left if parent_of(p) is not None]:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.1)
            finally:
                for pid in left:  # found wanting; they are not to hold the device on top of that
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        before = rows(database)
        print(
            f"killed: child {victim} after {seen} rows or more, the run after {len(before)}; "
            f"{len(left)} processes left",
            flush=True,
        )
        with started([*command, "--budget", budget(end)], environment, folder / "second.log") as again:
            status = again.wait(max(1.0, end - time.monotonic()))
        if time.monotonic() > end - 2 * MARGIN_S:
            cut = "the budget of --seconds is spent"
    except subprocess.TimeoutExpired:
        cut = "--seconds are over"
    except KeyboardInterrupt:
        cut = "stopped by a signal"
    after = rows(database)
    # a row that says nothing is filled in by the next call; every other one stands
    lost = [key for key, value in before.items() if value[0] != "unproven" and after.get(key) != value]
    print(f"the same command again: exit {status}, {len(after)} rows; {len(lost)} of {len(before)} changed")
    bad = bool(left or lost or status)
    print("\n| route | rows | failed | kind | expected |\n|---|---|---|---|---|")
    for route in (*known.split(","), "demo-strays", "demo-hangs"):
        mine = [value for key, value in after.items() if key[2] == route]
        failed = [value for value in mine if value[0] == "failed"]
        kinds = ", ".join(sorted({value[1] for value in failed})) or "-"
        expected = {"demo-strays": "illegal_access", "demo-hangs": "hang"}.get(route, "-")
        open_rows = [value for value in mine if value[0] == "unproven"]
        bad = bad or kinds != expected or bool(open_rows) or not mine
        print(f"| {route} | {len(mine)} | {len(failed)} | {kinds} | {expected} |")
    if cut and bad:
        print(f"\nUNFINISHED: {cut}; the second run's last line: {last_line(folder / 'second.log')}")
    else:
        print("\n" + (f"FAILED: {last_line(folder / 'second.log')}" if bad else "as it should be"))
    return int(bad)


def budget(end: float) -> str:
    """What is left, as ``--budget`` takes it; a run tells its last words before it is cut off."""
    return f"{max(5, int(end - time.monotonic() - MARGIN_S))}s"


def last_line(log: Path) -> str:
    """Of a run's log; where the folder is a temporary one, nothing else of it stays."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "none")


if __name__ == "__main__":
    sys.exit(main())
