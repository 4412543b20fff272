"""The parts of ``scripts/fault_demo.py``: who lives, who is killed, and the package that it offers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.arena.base import Placement
from autotune.arena.cuda_vmm import offset_of
from autotune.arena.operands import Recipe, pages_of
from autotune.checks import registry
from autotune.checks.base import Trial
from autotune.checks.launch import Stage, Tally
from autotune.cli.context import SEED, ask
from autotune.cli.filters import Filters
from autotune.domain.fingerprint import Facts
from autotune.routes.planted_cuda import PlantedCuda
from autotune.tuner.prover import seed_of

GRANULARITY = 2 << 20  # of a CUDA mapping
ENTRY_BYTES = 4

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fault_demo.py"
# a shell with a child, which it waits for
FAMILY = ["/bin/sh", "-c", "sleep 300 & wait"]


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("fault_demo", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = _module()


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a child."""
    with subprocess.Popen(FAMILY) as parent:
        try:
            deadline = time.monotonic() + 60.0
            while not demo.descendants(parent.pid):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield parent
        finally:
            for pid in demo.descendants(parent.pid):
                os.kill(pid, signal.SIGKILL)
            parent.kill()  # does nothing to one that was waited for


def test_a_child_is_killed_and_not_the_run(family: subprocess.Popen[bytes]) -> None:
    (child,) = demo.descendants(family.pid)
    assert demo.parent_of(child) == family.pid
    assert demo.kill_last(family.pid) == child
    assert family.wait(60.0) == 0  # the shell's wait has ended
    with pytest.raises(SystemExit, match="no child to kill"):
        demo.kill_last(family.pid)


def test_one_that_nobody_waits_for_does_not_live_on() -> None:
    child = subprocess.Popen(["/bin/true"])
    deadline = time.monotonic() + 60.0
    while demo.parent_of(child.pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}").exists()
    assert child.pid not in demo.descendants(os.getpid())
    child.wait()


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_is_left_leaves_nothing(ended: bool, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    code = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(0.0 if sys.argv[1:] else 300.0)"
    family = f"{sys.executable} -c '{code}' {'end' if ended else ''} & wait"
    children: list[int] = []
    with demo.started(["/bin/sh", "-c", family], dict(os.environ), log) as run:
        deadline = time.monotonic() + 60.0
        while not log.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = [int(log.read_text())]
        if ended:
            assert run.wait(60.0) == 0
    assert run.poll() is not None
    while any(demo.parent_of(pid) is not None for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert demo.last_line(log) == str(children[0])


def test_a_budget_ends_before_the_demo_does() -> None:
    assert 600 - demo.MARGIN_S - 3 <= int(demo.budget(time.monotonic() + 600).removesuffix("s")) <= 590
    assert demo.budget(time.monotonic()) == "5s"


def test_no_database_has_no_rows(tmp_path: Path) -> None:
    assert demo.rows(tmp_path / "none.db") == {}
    (tmp_path / "empty.db").touch()
    assert demo.rows(tmp_path / "empty.db") == {}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_its_package_offers_two_routes(device: str, tmp_path: Path) -> None:
    demo.plugin(tmp_path, device)
    kind = {"cpu": "cpu", "gpu": "cuda"}[device]
    code = (
        "from autotune.routes.registry import load_errors, routes\n"
        f"found = routes({kind!r}); assert not load_errors(), load_errors()\n"
        "import demo_routes\n"
        "for made in (demo_routes.Strays(), demo_routes.Hangs()):\n"
        "    assert found[made.name].capture is made.capture\n"
        "    print(f'{made.name}={made.planted}')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(SCRIPT.parents[1])))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    prefix = {"cpu": "planted-", "gpu": "planted-cuda-"}[device]
    assert sorted(done.stdout.split()) == [
        f"demo-hangs={prefix}hang",
        f"demo-strays={prefix}narrow-table",
    ]


def _no_arena(placement: Placement) -> Any:
    raise AssertionError("nothing is launched here")


class _StopError(Exception):
    """A check goes no further: it has said what it would launch."""


class _Recorder:
    """Stands for an opened session: operands are asked of it, nothing is launched."""

    def __init__(self) -> None:
        self.recipes: list[Recipe] = []
        self.arena = self

    def build(self, recipe: Recipe) -> Any:
        self.recipes.append(recipe)
        return SimpleNamespace(recipe=recipe)

    def launch(self, *_: object, **__: object) -> None:
        """Recorded when it was built."""

    def fire(self, *_: object) -> None:
        raise _StopError


def launches(name: str, trial: Trial) -> list[Recipe]:
    """What a check launches first, with operands flush at the tail."""
    recorder = _Recorder()
    stage: Any = Stage(name, trial, Placement.TAIL, Tally())
    stage.sequence = lambda recipes, label: recorder.recipes.extend(recipes)
    stage.opened = lambda recipe: contextlib.nullcontext(recorder)
    check: Any = registry.get(name)
    # poisoned_output makes its guard rows of real operands
    with contextlib.suppress(_StopError, AttributeError):
        check._launches(stage)
    assert recorder.recipes
    return recorder.recipes


def first_stray(cells: list[str]) -> tuple[str, int, bool]:
    """The first launch in which the planted table is too narrow: its check, its number, whether it faults.

    The study is the one that the script's ``cells`` ask for, its seeds and lengths those of ``autotune run``,
    and the table lies where CUDA's arena puts it.
    """
    asked: dict[str, Any] = {
        flag[2:].replace("-", "_"): value for flag, value in zip(cells[::2], cells[1::2], strict=True)
    }
    filters = Filters(**asked)
    grid = ask("h200", "generic", None, filters).grid
    (column,) = {item.cell.column for item in grid.cells}
    kv_lens = tuple(sorted({column.max_context, *(item.cell.kv_high for item in grid.cells)}))
    facts = Facts("cuda", {"compute_capability": "9.0"}, {})
    page = column.shape.page_size
    for name in registry.runs(column, "cuda"):
        seed = seed_of(SEED, column.id, "demo-strays", name)
        route = PlantedCuda("planted-cuda-narrow-table")
        trial = Trial(route, column, facts, kv_lens, seed, "cuda", _no_arena, lambda _: None)
        for number, recipe in enumerate(launches(name, trial), 1):
            lens = recipe.kv_lens
            width = max(1, pages_of(max(lens) - column.q_len, page))
            if pages_of(max(lens), page) == width:
                continue
            nbytes = len(lens) * width * ENTRY_BYTES
            end = ((len(lens) - 1) * width + pages_of(lens[-1], page)) * ENTRY_BYTES
            return name, number, offset_of(Placement.TAIL, GRANULARITY, nbytes) + end > GRANULARITY
    raise AssertionError("no launch reads past the table")


def test_the_stray_read_lands_past_the_mapping() -> None:
    cells = demo.CELLS["gpu"]
    assert first_stray(cells) == ("ragged_lengths", 1, True)
    # what an H200 said of one request: a NaN, in launch 5 of the check
    alone = ["1" if before == "--batch" else word for before, word in zip(["", *cells], cells, strict=False)]
    assert first_stray(alone) == ("ragged_lengths", 5, False)


def test_a_run_that_ends_by_itself_says_why(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    command = ["/bin/sh", "-c", "echo autotune: no such GPU >&2; exit 3"]
    with (
        pytest.raises(SystemExit, match=r"\(exit 3\) before it could be disturbed: autotune: no such GPU$"),
        demo.started(command, dict(os.environ), log) as run,
    ):
        demo.until(lambda: False, run, time.monotonic() + 60.0, log)
