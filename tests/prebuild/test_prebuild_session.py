"""What a build started ends with it: the session's processes, in whatever group, willing or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.prebuild import session

# As under ninja: a leader, and a compiler in a process group of its own below another process.
TREE = '''
import signal, subprocess, sys
if sys.argv[1] == "stubborn":  # which is handed down
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
ninja = """
import os, subprocess
subprocess.run(["sleep", "300"], preexec_fn=lambda: os.setpgid(0, 0))
"""
subprocess.run([sys.executable, "-c", ninja])
'''


def until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


def names(leader: int) -> list[str]:
    found = []
    for pid in session.members(leader):
        try:
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return found


@pytest.fixture
def tree(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    leader = subprocess.Popen([sys.executable, "-c", TREE, request.param], start_new_session=True)
    until(lambda: "sleep" in names(leader.pid))
    yield leader
    for pid in session.members(leader.pid):
        os.kill(pid, signal.SIGKILL)
    leader.wait()


@pytest.mark.parametrize("tree", ["willing", "stubborn"], indirect=True)
def test_all_of_a_session_ends_and_nobody_else(tree: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as neighbour:
        assert len(session.members(tree.pid)) == 3
        session.end(tree.pid, patience_s=0.3)
        until(lambda: not session.members(tree.pid))
        assert session.members(neighbour.pid) == [neighbour.pid]
        neighbour.kill()
    assert tree.wait() in (-signal.SIGTERM, -signal.SIGKILL)
    session.end(tree.pid)  # there is nobody left, which is no error


def test_a_compiler_that_is_interrupted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def interrupted(self: subprocess.Popen[str], text: str | None = None) -> tuple[str, str]:
        until(lambda: "sleep" in names(self.pid))
        seen.append(self.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.run(["sh", "-c", "sleep 300; true"])
    until(lambda: not session.members(seen[0]))


def test_a_compiler_s_output_and_status_come_back() -> None:
    done = session.run(["sh", "-c", "cat; echo no >&2; exit 3"], "text")
    assert (done.stdout, done.stderr, done.returncode) == ("text", "no\n", 3)
    with pytest.raises(OSError, match="No such file"):
        session.run(["/nowhere/nvcc"])


# The leader of a build, below a parent that may be killed: says that it is ready by the name of its compiler.
LEADER = """
import os, subprocess, sys
from autotune.prebuild.session import end_with_parent
end_with_parent(int(sys.argv[1]))
subprocess.run(["sleep", "300"], preexec_fn=lambda: os.setpgid(0, 0))
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_parent_that_dies_at_once_takes_the_session_along(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, LEADER],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as parent:
        assert parent.stdout is not None
        leader = int(parent.stdout.readline())
        until(lambda: "sleep" in names(leader))
        parent.send_signal(number)
    until(lambda: not session.members(leader))


def test_a_child_of_a_dead_parent_does_not_begin() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEADER, "1" if os.getpid() != 1 else "2"],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
        timeout=60,
    )
    assert done.returncode == 128 + signal.SIGTERM


def test_who_leads_no_session_is_left_as_it_is() -> None:
    code = (
        "import signal; from autotune.prebuild.session import end_with_parent; end_with_parent(1)\n"
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"
