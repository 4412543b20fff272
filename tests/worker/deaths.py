"""Deaths to order: a child dies or misbehaves in a chosen way at a chosen step of its life.

The jobs are the real ones with one fault inside. What they replace they replace in the child alone, so the
parent runs nothing but its own code. Before a fault strikes, the child starts a process of its own that would
outlive it.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar, cast

from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import FailureKind, UnprovenReason
from autotune.routes.base import Allocate, Capacity, Capture, Family, Need, Session, Step
from autotune.worker import jobs
from autotune.worker.base import Channel
from autotune.worker.jobs import ProveJob, TimeJob

MORTAL = "mortal-"
FOREVER_S = 120.0
FULL = os.environ.get("AUTOTUNE_FULL_MATRIX") == "1"


@dataclass(frozen=True)
class Fault:
    """One way to die at one step.

    Attributes:
        step: see :data:`PROVE_STEPS`, :data:`TIME_STEPS`.
        nth: at which time that the step is reached,
        reports: counted once timing has made so many reports.
        orphan: a process is left behind: in the child's session or one of its own.
    """

    way: str
    step: str
    nth: int = 1
    reports: int = 0
    orphan: str | None = None

    def __str__(self) -> str:
        return f"{self.way}@{self.step}"


# --- ways


class _Child:
    """What this process, a worker's child, has to die with."""

    fault: Fault | None = None
    channel: Any = None
    reached: ClassVar[dict[str, int]] = {}
    phase = ""
    reports = 0
    arenas: ClassVar[list[Any]] = []
    next_job = threading.Event()


def _hole() -> None:
    """Reads the first byte past a guarded operand."""
    import torch

    from autotune.arena.base import Placement
    from autotune.arena.host_mmap import HostMmapArena

    arena = HostMmapArena(Placement.TAIL)
    _Child.arenas.append(arena)
    arena.__enter__()
    tensor = arena.tensor("victim", (1000,), torch.uint8)
    ctypes.c_ubyte.from_address(tensor.data_ptr() + 1000).value  # noqa: B018


def _wild() -> None:
    ctypes.c_ubyte.from_address(0xDEAD0000).value  # noqa: B018


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def _stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(FOREVER_S)


def _hung() -> None:
    """A regular expression that backtracks for years, in C, with the GIL held."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def _raises() -> None:
    raise ValueError("no plan")


def _quits() -> None:
    sys.exit(4)


def _interrupted() -> None:
    raise KeyboardInterrupt


def _out_of_memory() -> None:
    """A real MemoryError; the limit stays, as memory does that a route took and keeps."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 16), hard))
    bytearray(1 << 40)


def _garbled() -> None:
    """A whole frame that is no message, then life goes on."""
    _Child.channel._conn.send_bytes(b"\x00 not a pickle")
    time.sleep(FOREVER_S)


def _cut() -> None:
    """Half a frame, then the end."""
    os.write(_Child.channel._conn.fileno(), struct.pack("!i", 4096) + b"half")
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER_S)


def _stalled() -> None:
    """Half a frame, and nothing more."""
    os.write(_Child.channel._conn.fileno(), struct.pack("!i", 4096) + b"half")
    time.sleep(FOREVER_S)


def _closed() -> None:
    """The pipe is closed, the process lives."""
    os.closerange(3, 256)
    time.sleep(FOREVER_S)


WAYS: dict[str, Callable[[], None]] = {
    "hole": _hole,
    "wild": _wild,
    "kill": _killed,
    "abort": os.abort,
    "exit0": lambda: os._exit(0),
    "exit3": lambda: os._exit(3),
    "hang": _hung,
    "stop": _stopped,
    "raise": _raises,
    "quit": _quits,
    "interrupt": _interrupted,
    "memory": _out_of_memory,
    "garbage": _garbled,
    "cut": _cut,
    "stall": _stalled,
    "close-pipe": _closed,
}
# These need a watchdog, or a wait, to be noticed.
SLOW = frozenset({"hang", "stop", "stall", "close-pipe"})


# What a death in a launch accuses the kernel of.
ACCUSED = {
    "hole": FailureKind.ILLEGAL_ACCESS,
    "wild": FailureKind.CRASH,
    "abort": FailureKind.CRASH,
    "exit0": FailureKind.CRASH,
    "exit3": FailureKind.CRASH,
    "hang": FailureKind.HANG,
    "stop": FailureKind.HANG,
    "raise": FailureKind.LAUNCH_ERROR,
    "quit": FailureKind.LAUNCH_ERROR,
    "interrupt": FailureKind.LAUNCH_ERROR,
}
# Nothing was launched: neither an exception nor slowness accuses.
EXCUSED_IN_OPENING = (FailureKind.LAUNCH_ERROR, FailureKind.HANG)


def expected(fault: Fault, whose: str) -> FailureKind | UnprovenReason:
    """What a death says, by whose code ran (see :data:`PROVE_STEPS`)."""
    if fault.step.endswith(" half"):
        return UnprovenReason.INFRASTRUCTURE  # whatever else is sent is not heard
    kind = ACCUSED.get(fault.way)
    if kind is not None and (whose == "launch" or (whose == "opening" and kind not in EXCUSED_IN_OPENING)):
        return kind
    if fault.way == "memory":
        return UnprovenReason.OUT_OF_MEMORY
    if whose == "ours" and fault.way in ("hang", "stop"):
        return UnprovenReason.BUDGET
    return UnprovenReason.INFRASTRUCTURE


def reach(step: str) -> None:
    """A step is reached; dies if that is what was ordered."""
    fault = _Child.fault
    if fault is None or fault.step != step or _Child.reports < fault.reports:
        return
    _Child.reached[step] = _Child.reached.get(step, 0) + 1
    if _Child.reached[step] != fault.nth:
        return
    if fault.orphan is not None:
        subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=fault.orphan == "session")
    WAYS[fault.way]()


# --- a route


@dataclass(frozen=True)
class MortalRoute:
    """Correct attention (``torch-sdpa``'s) whose session passes through the steps where it may die."""

    name: str

    family = Family.DECODE
    capture = Capture.NO
    needs: frozenset[Need] = frozenset({Need.HOST_KV_LENS})
    deterministic = True
    version = 1

    def supports(self, column: Column, facts: Facts) -> str | None:
        """Whatever torch-sdpa does."""
        return cast("str | None", _sdpa().supports(column, facts))

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """A session that may die."""
        if self._is_the_one():
            reach("open")
        return MortalSession(_sdpa().open(capacity, allocate), self._is_the_one())

    def _is_the_one(self) -> bool:
        return self.name == MORTAL + "x"


class MortalSession:
    """Dies in ``prepare``, ``run``, ``look`` (the run that timing compares) or ``close session``."""

    def __init__(self, session: Session, mortal: bool) -> None:
        self._session = session
        self._mortal = mortal

    def prepare(self, step: Step) -> None:
        if self._mortal:
            reach("prepare")
        self._session.prepare(step)

    def run(self, out: Any) -> None:
        if self._mortal:
            reach("run" if _Child.phase in ("", "rounds") else f"run in {_Child.phase}")
            if _Child.fault is not None and _Child.fault.step == "late":
                _leave_a_thread()
        _Child.next_job.set()
        if not self._mortal and _Child.phase == "" and _late_is_due():
            time.sleep(0.3)
        self._session.run(out)

    def close(self) -> None:
        if self._mortal:
            reach("close session")
        self._session.close()


def _sdpa() -> Any:
    from autotune.routes.torch_sdpa import TorchSdpa

    return TorchSdpa()


class _Late:
    thread: threading.Thread | None = None


def _late_is_due() -> bool:
    return _Late.thread is not None and _Late.thread.is_alive()


def _leave_a_thread() -> None:
    """Strikes in the first launch of the next route that this child runs."""
    if _Late.thread is not None:
        return
    way = _Child.fault.way if _Child.fault else "exit0"

    def strike() -> None:
        while _Child.fault is not None:  # the job that left it here still runs
            time.sleep(0.001)
        _Child.next_job.clear()
        _Child.next_job.wait()
        WAYS[way]()

    _Late.thread = threading.Thread(target=strike, daemon=True)
    _Late.thread.start()


# --- jobs


def _prepare_child(fault: Fault | None, channel: Any) -> None:
    """Put what the steps need in place; once a process where it is not a job's own."""
    from autotune.checks import oracle

    _Child.fault, _Child.channel, _Child.reached, _Child.phase = fault, channel, {}, ""
    _Child.reports = 0
    if not hasattr(jobs, "_immortal_child_route"):
        original: Any = jobs.child_route
        cast(Any, jobs)._immortal_child_route = original
        jobs.child_route = lambda name: MortalRoute(name) if name.startswith(MORTAL) else original(name)
        reference = oracle.reference

        def judged(operands: Any) -> Any:
            reach("judge")
            return reference(operands)

        oracle.reference = judged
    _watch_answers(channel)


def _watch_answers(channel: Any) -> None:
    answer, ask = channel.answer, channel.ask

    def half(message: Any) -> None:
        if _Child.fault is not None and _Child.fault.step in ("answer half", "ask half"):
            pickled = bytes(ForkingPickler.dumps(message))
            frame = struct.pack("!i", len(pickled) + 64) + pickled
            os.write(channel._conn.fileno(), frame[: len(frame) // 2])

    def answering(message: Any) -> None:
        if _Child.fault is not None and _Child.fault.step == "answer half":
            half(message)
            reach("answer half")
        answer(message)
        reach("answered")
        _Child.fault = None

    def asking(payload: Any) -> Any:
        if _Child.fault is not None and _Child.fault.step == "ask half":
            if _Child.reports >= _Child.fault.reports:
                half(payload)
            reach("ask half")
        reply = ask(payload)
        _Child.reports += 1
        reach("told")
        return reply

    channel.answer, channel.ask = answering, asking


class _DiesWhenPickled(dict[str, Any]):
    def __reduce__(self) -> Any:
        reach("answer")
        return dict, (dict(self),)


def _load(cls: Any, values: dict[str, Any]) -> Any:
    _Child.fault, _Child.reached = values["fault"], {}
    reach("load")
    return cls(**values)


@dataclass(frozen=True)
class MortalProve(ProveJob):
    """A :class:`ProveJob` with a fault inside."""

    fault: Fault | None = None

    def __reduce__(self) -> Any:
        return _load, (type(self), {field.name: getattr(self, field.name) for field in fields(self)})

    def __call__(self, channel: Channel) -> dict[str, Any]:
        _prepare_child(self.fault, channel)
        reach("start")
        return _DiesWhenPickled(super().__call__(channel))


@dataclass(frozen=True)
class MortalTime(TimeJob):
    """A :class:`TimeJob` with a fault inside."""

    fault: Fault | None = None

    def __reduce__(self) -> Any:
        return _load, (type(self), {field.name: getattr(self, field.name) for field in fields(self)})

    def __call__(self, channel: Channel) -> Any:
        from autotune.bench import rounds

        _prepare_child(self.fault, channel)
        if not hasattr(rounds, "_immortal"):
            original: Any = rounds.time_cell
            cast(Any, rounds)._immortal = original

            def time_cell(*arguments: Any, phase: Any, **more: Any) -> None:
                def begins(text: str) -> None:
                    phase(text)
                    _Child.phase = text
                    reach(f"phase {text.partition(' ')[0]}")

                original(*arguments, phase=begins, **more)

            rounds.time_cell = cast(Any, time_cell)
        reach("start")
        return super().__call__(channel)


# Steps of a proof's child, in the order in which they come; whose code runs there.
PROVE_STEPS = {
    "load": "ours",
    "start": "ours",
    "open": "opening",
    "judge": "ours",
    "prepare": "launch",
    "run": "launch",
    "close session": "launch",
    "answer": "ours",
    "answer half": "ours",
    "answered": "after",
    "late": "late",
}
TIME_STEPS = {
    "load": "ours",
    "start": "ours",
    "phase pools": "ours",
    "phase open": "ours",
    "open": "opening",
    "phase start-up": "ours",
    "run in start-up": "launch",
    "phase rounds": "ours",
    "prepare": "launch",
    "run": "launch",
    "phase look": "ours",
    "run in look": "launch",
    "phase report": "ours",
    "ask half": "ours",
    "told": "ours",
    "phase close": "ours",
    "close session": "ours",
    "answered": "after",
}
