"""A process that dies leaves the names of what it had captured; one that ends in order leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.domain.traffic import bucket
from autotune.engines.suspects import PREFIX, Captured, find_suspects, forget_suspects
from autotune.engines.traffic import Traffic

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import os, signal, sys
from pathlib import Path
from autotune.engines.suspects import Captured
kept = Captured(Path(sys.argv[1]), "sglang", table="t.yaml", digest="sha256:0")
kept.add("fmha-v2", "8/1/128 q_len 4 batch 16")
kept.add("fmha-v2", "8/1/128 q_len 4 batch 16")
kept.add("xqa-decode", "8/1/128 q_len 4 batch 1")
if sys.argv[2] == "error":
    kept.saw(RuntimeError("CUDA error: an illegal memory access was encountered"))
if sys.argv[2] == "other":
    kept.saw(ValueError("a bad request"))
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.exit(0)
"""


def child(folder: Path, how: str) -> int:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), how], cwd=ROOT, check=False, timeout=100
    ).returncode


@pytest.mark.parametrize(
    ("how", "died"), [("exit", False), ("other", False), ("fork", False), ("kill", True), ("error", True)]
)
def test_only_a_bad_end_leaves_suspects(tmp_path: Path, how: str, died: bool) -> None:
    code = child(tmp_path, how)
    assert code == (-signal.SIGKILL if how == "kill" else 0)
    found = find_suspects(tmp_path)
    assert len(found) == died
    if died:
        (suspect,) = found
        assert [route for route, _ in suspect.routes] == ["fmha-v2", "xqa-decode"]
        assert ("illegal memory access" in suspect.death) == (how == "error")
        assert "fmha-v2 at 8/1/128 q_len 4 batch 16" in str(suspect)
        assert forget_suspects(found) == 1 and find_suspects(tmp_path) == ()


def test_a_running_process_is_no_suspect_and_a_number_used_again_hides_none(tmp_path: Path) -> None:
    child(tmp_path, "kill")
    (path,) = tmp_path.glob(f"{PREFIX}*.json")
    data = json.loads(path.read_text())
    mine = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    path.write_text(json.dumps(data | {"pid": os.getpid(), "born": mine}))
    assert find_suspects(tmp_path) == ()
    path.write_text(json.dumps(data | {"pid": os.getpid(), "born": "1"}))
    assert len(find_suspects(tmp_path)) == 1


def test_a_successor_of_the_same_number_leaves_the_dead_ones_file(tmp_path: Path) -> None:
    child(tmp_path, "error")
    (path,) = tmp_path.glob(f"{PREFIX}*.json")
    data = json.loads(path.read_text()) | {"pid": os.getpid(), "born": "1"}
    dead = path.rename(tmp_path / f"{PREFIX}sglang-{os.getpid()}-1-5.json")
    dead.write_text(json.dumps(data))
    first, second = (Captured(tmp_path, "sglang", table="t", digest="d") for _ in range(2))
    assert first.path != second.path
    first.add("fmha-v2", "k")
    second.add("fmha-v2", "k")
    first.close()
    assert second.path.exists() and not first.path.exists()
    second.close()
    assert [each.path for each in find_suspects(tmp_path)] == [dead]


def test_what_is_forgotten_is_the_file_that_was_found(tmp_path: Path) -> None:
    state, other = tmp_path / "state", tmp_path / "x-1.json"
    (state / f"{PREFIX}sglang-1").mkdir(parents=True)
    other.write_text("keep")
    child(state, "kill")
    (path,) = state.glob(f"{PREFIX}*.json")
    data = json.loads(path.read_text()) | {"engine": "sglang-1/../../x", "pid": 1, "born": "none\x1b[2J"}
    path.write_text(json.dumps(data | {"table": "a\x1b[2J\nb"}))
    (found,) = find_suspects(state)
    assert found.table == "a?[2J?b"
    assert forget_suspects([found]) == 1
    assert other.read_text() == "keep" and not path.exists()


BAD_PID = (
    '{"engine": "e", "pid": 1e999, "started": "", "table": "", "digest": "", "death": "x", "routes": []}'
)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x"}', "[" * 5000, BAD_PID])
def test_a_file_that_is_none_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / f"{PREFIX}sglang-1.json").write_text(text)
    assert find_suspects(tmp_path) == ()
    assert find_suspects(tmp_path / "none") == ()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{PREFIX}sglang-1.json")
    assert find_suspects(tmp_path) == ()


@pytest.mark.parametrize(
    ("kv_len", "end"), [(1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048), (131072, 131072)]
)
def test_bucket(kv_len: int, end: int) -> None:
    assert bucket(kv_len) == end


def test_traffic_counts_and_writes_once_a_minute(tmp_path: Path) -> None:
    now = [0.0]
    traffic = Traffic(tmp_path / "deep" / "shapes.jsonl", clock=lambda: now[0])
    for _ in range(3):
        traffic.count(16, 4, 5000)
    traffic.count(1, 4, None)
    assert not (tmp_path / "deep").exists()
    now[0] = 61.0
    traffic.count(1, 4, None)
    lines = (tmp_path / "deep" / "shapes.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"batch": 16, "q_len": 4, "kv": 8192, "count": 3},
        {"batch": 1, "q_len": 4, "kv": None, "count": 2},
    ]


WRITER = """
import os, signal, sys, time
from pathlib import Path
from autotune.engines.traffic import Traffic
traffic = Traffic(Path(sys.argv[1]))
traffic.count(2, 4, 100)
if sys.argv[2] == "signal":
    os.kill(os.getpid(), signal.SIGUSR2)
    time.sleep(0.01)
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["exit", "signal"])
def test_traffic_is_written_on_exit_and_on_a_signal(tmp_path: Path, how: str) -> None:
    path = tmp_path / "shapes.jsonl"
    subprocess.run([sys.executable, "-c", WRITER, str(path), how], cwd=ROOT, check=True, timeout=100)
    assert json.loads(path.read_text()) == {"batch": 2, "q_len": 4, "kv": 128, "count": 1}
