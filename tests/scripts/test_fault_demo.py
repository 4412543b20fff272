"""The parts of ``scripts/fault_demo.py``: who lives, who is killed, and the package that it offers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
