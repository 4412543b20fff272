"""Real processes, real gloo: any difference puts every rank on the fallback, and all say the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.router import Router
from autotune.router.ranks import assert_same_table
from autotune.table.dump import dump_table
from autotune.table.model import Quarantine
from tests.table import samples

ROOT = Path(__file__).parents[2]
WORLD = 3
TABLE = dump_table(samples.sample())
OTHER = dump_table(
    samples.table_of(
        samples.sample_cells(),
        quarantine=[Quarantine(samples.SPLIT, "x", "2026-01-01T00:00:00Z", batch_size=8)],
    )
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ranks(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(TABLE)
    (tmp_path / "b.yaml").write_bytes(OTHER)
    init = f"tcp://127.0.0.1:{free_port()}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = str(Path(__file__).with_name("rank_process.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(WORLD), str(tmp_path), init],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    found: list[dict[str, Any]] = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=100)
            assert rank.returncode == 0, err[-2000:]
            found.append({line["step"]: line for line in map(json.loads, out.splitlines())})
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for lines in found:
        for step in ("alone", "equal", "equal again"):
            assert (lines[step]["same"], lines[step]["route"]) == (True, samples.SPLIT), lines[step]
            assert lines[step]["state"] == "active"
        differs = lines["one differs"]
        assert (differs["same"], differs["route"], differs["state"]) == (False, "fallback", "inactive")
        assert "ranks 0, 1 sha256:" in differs["detail"]
        assert "; rank 2 sha256:" in differs["detail"]
        assert differs["detail"] in differs["reason"]
        late = lines["one is late"]
        assert (late["same"], late["route"], late["state"]) == (False, "fallback", "inactive")
        assert "rank 1 did not answer in time" in late["detail"]
        none = lines["none has one"]
        assert (none["same"], none["route"], none["state"]) == (True, "fallback", "inactive")
    for step in ("one differs", "one is late"):
        assert len({lines[step]["detail"] for lines in found}) == 1
    assert [("two of them" in lines) for lines in found] == [True, False, True]
    assert found[0]["two of them"]["same"] is True


def test_a_process_alone_agrees_with_itself(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_bytes(TABLE)
    router = Router.load(path, facts=samples.FACTS)
    assert assert_same_table(router) == (True, "one rank")
    assert router.status.active


def test_a_group_that_cannot_be_asked_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed

    path = tmp_path / "table.yaml"
    path.write_bytes(TABLE)
    router = Router.load(path, facts=samples.FACTS)
    bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    found = assert_same_table(router, timeout_s=0.1)
    assert not found.same
    assert (bound.route(2, 4, 100), router.status.state) == ("fallback", "inactive")
    assert "could not be compared" in router.status.reason
    monkeypatch.undo()
    assert assert_same_table(router).same
    assert (bound.route(2, 4, 100), router.status.state) == (samples.SPLIT, "active")
