"""``emulated-trtllm-gen-decode``, ``-decode-ragged``, ``-context``: the trtllm-gen routes on the CPU.

For proofs only. The registry never lists a name that begins with ``emulated-`` and skips an entry point that
has one, so that no run can time or choose such a route; a worker's child finds it by its name alone, as it
finds the planted ones. A table with such a name is refused when it is written and when it is read.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.domain.fingerprint import Facts
from autotune.domain.route_name import EMULATED
from autotune.hardware.flashinfer import flashinfer_facts
from autotune.routes.base import Capture, Family, Need
from autotune.routes.flashinfer.emulation.planted import MISTAKES, Change
from autotune.routes.flashinfer.trtllm_gen import TrtllmGenContext, TrtllmGenDecode, TrtllmGenDecodeRagged

if TYPE_CHECKING:
    import torch

    from autotune.domain.cell import Column
    from autotune.routes.arithmetic import Arithmetic
    from autotune.routes.base import Allocate, Capacity, Session, Step

# What a B200 says of itself, as far as the library asks.
CAPABILITY = (10, 0)
SM_COUNT = 148
# ``struct sigaction``, with room to spare.
_SIGACTION_BYTES = 256
_FAULTS = (signal.SIGSEGV, signal.SIGBUS)

BASES = {base.name: base for base in (TrtllmGenDecode(), TrtllmGenDecodeRagged(), TrtllmGenContext())}

_replaced: ExitStack | None = None
_open_sessions = 0


def b200(facts: Facts) -> Facts:
    """``facts`` of this machine with a B200 in it, still on the CPU: for the trials of emulated routes.

    The operands are then made as an engine on a B200 makes them (NVFP4's V scales interleaved).
    """
    hardware = {**facts.hardware, "compute_capability": f"{CAPABILITY[0]}.{CAPABILITY[1]}"}
    return replace(facts, hardware={**hardware, "sm_count": SM_COUNT})


@contextmanager
def _kept_fault_handlers() -> Iterator[None]:
    """FlashInfer's tvm_ffi takes SIGSEGV for itself when it is imported. A proof needs the handler that was
    there: it says which operand a kernel left."""
    libc = ctypes.CDLL(None)
    kept = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in _FAULTS}
    for number, action in kept.items():
        libc.sigaction(int(number), None, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            libc.sigaction(int(number), action, None)


@contextmanager
def _emulation() -> Iterator[None]:
    """The library with a B200 and our launchers, while any emulated session is open."""
    global _open_sessions, _replaced
    if _open_sessions == 0:
        from autotune.routes.flashinfer.emulation.launcher import Launchers
        from autotune.routes.flashinfer.nogpu import no_gpu

        with _kept_fault_handlers():
            # what a session resolves: patched functions must be in the modules that call them
            for module in ("flashinfer.decode", "flashinfer.prefill"):
                importlib.import_module(module)
        _replaced = ExitStack()
        _replaced.enter_context(no_gpu(CAPABILITY, SM_COUNT, lambda spec: Launchers()))
    _open_sessions += 1
    try:
        yield
    finally:
        _open_sessions -= 1
        if _open_sessions == 0 and _replaced is not None:
            _replaced.close()
            _replaced = None


@dataclass(frozen=True)
class Emulated:
    """A trtllm-gen route whose compiled launcher is emulated.

    Attributes:
        name: ``emulated-`` and the route's own, or a mistake's (``planted``).
        base: the route.
        mistake: what is changed in each call of the library; None: nothing.
    """

    name: str
    base: TrtllmGenDecode | TrtllmGenDecodeRagged | TrtllmGenContext
    mistake: Change | None = None

    capture = Capture.NO
    deterministic = False

    @property
    def family(self) -> Family:
        """The route's."""
        return self.base.family

    @property
    def needs(self) -> frozenset[Need]:
        """The route's."""
        return frozenset(self.base.needs)

    @property
    def version(self) -> int:
        """The route's."""
        return self.base.version

    def arithmetic(self, column: Column, facts: Facts) -> Arithmetic:
        """What the kernel may round, although the emulated one does not."""
        return self.base.arithmetic(column, Facts("cuda", b200(facts).hardware, facts.software))

    def supports(self, column: Column, facts: Facts) -> str | None:
        """What the route says on a B200, and whether it can be emulated here."""
        if facts.device != "cpu":
            return f"an emulation runs on the CPU, not on {facts.device}"
        found = flashinfer_facts()["flashinfer"]
        if found is None:
            return "FlashInfer is not installed: its Python layer is what an emulation runs"
        if column.dtypes.kv == "nvfp4" and facts.hardware != b200(facts).hardware:
            return "nvfp4 KV is stored otherwise on 10.x: the trial needs the facts of emulation.route.b200"
        return self.base.supports(column, Facts("cuda", b200(facts).hardware, {"flashinfer": found}))

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``.

        Raises:
            ImportError: FlashInfer is not installed.
        """
        return _Session(self, capacity, allocate)


class _Session:
    """A session of the route, inside the emulation."""

    def __init__(self, route: Emulated, capacity: Capacity, allocate: Allocate) -> None:
        self._exits = ExitStack()
        self._step: Step | None = None

        def smaller(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            own = (workspace_bytes(capacity.column),) if name == "workspace" else shape
            return allocate(name, own, dtype)

        with ExitStack() as opening:
            opening.enter_context(_emulation())
            inner = self._inner = route.base.open(capacity, smaller)
            self._exits = opening.pop_all()
        if route.mistake is not None:
            _make(self, inner, route.mistake, allocate)

    def prepare(self, step: Step) -> None:
        """See ``Session.prepare``."""
        self._step = step
        self._inner.prepare(step)

    def run(self, out: torch.Tensor) -> None:
        """See ``Session.run``."""
        self._inner.run(out)

    @property
    def step(self) -> Step:
        """The prepared step."""
        assert self._step is not None, "prepare() comes first"
        return self._step

    def close(self) -> None:
        """See ``Session.close``."""
        self._inner.close()
        self._step = None
        self._exits.close()


def workspace_bytes(column: Column) -> int:
    """The scratch of the largest emulated launch, exactly: the routes ask for the half GiB that engines give
    them, which would be filled with canaries for every session.

    As many CTAs as there are SMs, each with a KV head's queries of one token: for every query head two fp32
    numbers and a partial result.
    """
    shape = column.shape
    return SM_COUNT * shape.group * (2 + shape.head_dim_vo) * 4


def _make(session: _Session, inner: Any, mistake: Change, allocate: Allocate) -> None:
    """Put ``mistake`` between the route's session and the library."""
    function = inner._function

    def mistaken(**kwargs: Any) -> Any:
        mistake(kwargs, session.step, allocate)
        return function(**kwargs)

    inner._function = mistaken


def emulated(name: str) -> Emulated:
    """The emulated route called ``name``, or the emulation with the mistake of that name.

    Raises:
        ValueError: there is none.
    """
    own = name.removeprefix(EMULATED)
    if name.startswith(EMULATED) and own in BASES:
        return Emulated(name, BASES[own])
    if name in MISTAKES:
        planting = MISTAKES[name]
        return Emulated(name, BASES[planting.base], planting.change)
    known = ", ".join([*(EMULATED + base for base in BASES), *MISTAKES])
    raise ValueError(f"no emulated route is called {name!r}; there are {known}")
