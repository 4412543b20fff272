"""Jobs for the worker's tests: each ends in a way of its own."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.worker.base import Channel


@dataclass(frozen=True)
class Add:
    a: int
    b: int

    def __call__(self, channel: Channel) -> int:
        channel.step("add")
        return self.a + self.b


@dataclass(frozen=True)
class Signal:
    """Kill ourselves the way a kernel would: from native code, with no Python exception."""

    number: int
    step: str = "launch"

    def __call__(self, channel: Channel) -> None:
        channel.step(self.step)
        os.kill(os.getpid(), self.number)
        time.sleep(10)


@dataclass(frozen=True)
class WildRead:
    """SIGSEGV outside every arena."""

    step: str = "launch"

    def __call__(self, channel: Channel) -> int:
        channel.step(self.step)
        return ctypes.c_ubyte.from_address(0xDEAD0000).value


@dataclass(frozen=True)
class HoleAccess:
    """Read or write one byte past a guarded operand."""

    write: bool

    def __call__(self, channel: Channel) -> int:
        import torch

        from autotune.arena.base import Placement
        from autotune.arena.host_mmap import HostMmapArena

        with HostMmapArena(Placement.TAIL) as arena:
            tensor = arena.tensor("victim", (1000,), torch.uint8)
            past = ctypes.c_ubyte.from_address(tensor.data_ptr() + 1000)
            channel.step("one past the end")
            if self.write:
                past.value = 1
            return past.value


@dataclass(frozen=True)
class Exit:
    status: int
    step: str = "launch"
    says: str = ""

    def __call__(self, channel: Channel) -> None:
        channel.step(self.step)
        os.write(2, self.says.encode())
        os._exit(self.status)


@dataclass(frozen=True)
class AbortWith:
    says: str

    def __call__(self, channel: Channel) -> None:
        channel.step("launch")
        os.write(2, self.says.encode())
        os.abort()


@dataclass(frozen=True)
class HoldGil:
    """A regular expression that backtracks for years, in C, with the GIL held."""

    step: str = "launch"

    def __call__(self, channel: Channel) -> None:
        channel.step(self.step)
        re.match(r"(a+)+$", "a" * 60 + "b")


@dataclass(frozen=True)
class Work:
    """Uses the processor for so long, which a pause does not shorten."""

    seconds: float

    def __call__(self, channel: Channel) -> None:
        channel.step("launch")
        start = time.process_time()
        while time.process_time() - start < self.seconds:
            pass


@dataclass(frozen=True)
class SleepInSteps:
    seconds: float
    steps: int

    def __call__(self, channel: Channel) -> int:
        for i in range(self.steps):
            channel.step(f"nap {i}")
            time.sleep(self.seconds)
        return self.steps


@dataclass(frozen=True)
class Raise:
    name: str
    text: str
    step: str = "launch"

    def __call__(self, channel: Channel) -> None:
        channel.step(self.step)
        kinds: dict[str, type[BaseException]] = {
            "RuntimeError": RuntimeError,
            "ImportError": ImportError,
            "SystemExit": SystemExit,
            "KeyboardInterrupt": KeyboardInterrupt,
        }
        raise kinds[self.name](self.text)


@dataclass(frozen=True)
class OutOfMemory:
    """A real MemoryError, under an address-space limit of this child."""

    def __call__(self, channel: Channel) -> int:
        channel.step("launch")
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 32, hard))
        try:
            return len(bytearray(1 << 40))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@dataclass(frozen=True)
class EmitThenDie:
    rows: int

    def __call__(self, channel: Channel) -> None:
        for i in range(self.rows):
            channel.step(f"row {i}")
            channel.emit({"row": i})
        ctypes.c_ubyte.from_address(0xDEAD0000).value  # noqa: B018


@dataclass(frozen=True)
class EmitPidThenDie:
    def __call__(self, channel: Channel) -> None:
        channel.step("launch")
        channel.emit(os.getpid())
        os.kill(os.getpid(), signal.SIGSEGV)


@dataclass(frozen=True)
class EmitPidThenSleep:
    def __call__(self, channel: Channel) -> None:
        channel.step("launch")
        channel.emit(os.getpid())
        time.sleep(30)


@dataclass(frozen=True)
class EmitBytes:
    size: int
    count: int

    def __call__(self, channel: Channel) -> int:
        for _ in range(self.count):
            channel.emit(b"x" * self.size)
        return self.count


@dataclass(frozen=True)
class Ask:
    questions: tuple[Any, ...]

    def __call__(self, channel: Channel) -> list[Any]:
        channel.step("asking")
        return [channel.ask(question) for question in self.questions]


@dataclass(frozen=True)
class Alternate:
    """Runs the steps named in turn, then ends in the last one."""

    turns: tuple[int | None, ...]
    end: str
    texts: tuple[str, ...] = ("even", "odd")

    def __call__(self, channel: Channel) -> None:
        enter = channel.among(self.texts)
        for turn in self.turns:
            enter(turn)
        if self.end == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif self.end == "raise":
            raise RuntimeError("CUDA error: misaligned address")
        time.sleep(30)


@dataclass(frozen=True)
class SayNonsense:
    """Writes a frame into the worker's pipe that is no message."""

    def __call__(self, channel: Channel) -> None:
        channel.step("launch")
        channel._conn.send_bytes(b"\x00 not a pickle")  # type: ignore[attr-defined]
        time.sleep(10)


@dataclass(frozen=True)
class Unpicklable:
    def __call__(self, channel: Channel) -> Any:
        return lambda: None


@dataclass(frozen=True)
class EmitUnpicklable:
    def __call__(self, channel: Channel) -> None:
        channel.emit(lambda: None)


@dataclass(frozen=True)
class Inspect:
    """What the child looks like from inside."""

    def __call__(self, channel: Channel) -> dict[str, Any]:
        import torch

        return {
            "modules": sorted(
                name for name in sys.modules if name in ("optuna", "sqlalchemy", "alembic", "typer", "rich")
            ),
            "pid": os.getpid(),
            "session": os.getsid(0),
            "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
            "threads": torch.get_num_threads(),
            "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "main": getattr(sys.modules["__main__"], "__file__", None),
        }


@dataclass(frozen=True)
class StartGrandchild:
    """Leaves processes of its own behind, then dies, hangs or returns.

    ``how``: ``same`` session, ``session`` of its own, or ``daemon``: one whose parent has ended as well.
    """

    end: str
    how: str = "same"

    def __call__(self, channel: Channel) -> None:
        if self.how == "daemon":
            script = "sleep 60 >/dev/null 2>&1 & echo $!"
            started = subprocess.run(["setsid", "sh", "-c", script], stdout=subprocess.PIPE, check=True)
            channel.emit(int(started.stdout))
        else:
            # a shell and what it started
            process = subprocess.Popen(["sh", "-c", "sleep 60; :"], start_new_session=self.how == "session")
            channel.emit(process.pid)
            while not (found := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
                time.sleep(0.01)
            channel.emit(int(found[0]))
        channel.step("launch")
        if self.end == "die":
            os._exit(3)
        if self.end == "hang":
            time.sleep(60)


@dataclass(frozen=True)
class ClosePipe:
    """Closes every descriptor, the worker's pipe included, and stays alive."""

    def __call__(self, channel: Channel) -> None:
        channel.step("launch")
        os.closerange(3, 256)
        time.sleep(30)
