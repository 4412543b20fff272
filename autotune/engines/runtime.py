"""What all hooks of a process share: the router, the policy, counters, the once-log, the captured routes."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autotune.engines.captures import Captures
from autotune.engines.choice import Choice, Chooser, row_ends, share
from autotune.engines.environment import Miss, Mode, Settings, find_table, read_settings
from autotune.engines.log import Once, say, start_level, told
from autotune.router import Router
from autotune.router.status import INACTIVE

if TYPE_CHECKING:
    from autotune.domain.dtypes import DTypes
    from autotune.domain.fingerprint import Facts
    from autotune.domain.shape import Shape
    from autotune.engines.suspects import Captured
    from autotune.engines.traffic import Traffic
    from autotune.router.status import RouterStatus

_Plugin = TypeVar("_Plugin")
_TRIES = 8


class Runtime:
    """One per process and hook. Made by :func:`start`, or by whoever has a router already."""

    def __init__(
        self,
        router: Router,
        *,
        engine: str,
        mode: Mode = Mode.ROUTE,
        miss: Miss = Miss.STOCK,
        attests: Iterable[str] = (),
        captured: Captured | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.router = router
        self.engine = engine
        self.mode = mode
        self.miss = miss
        self.captured = captured
        self.traffic = traffic
        self.captures = Captures()
        self.once = Once()
        # (what was called or would have been, why): how many calls
        self.counts: Counter[tuple[str, str]] = Counter()
        self._attests = frozenset(attests)
        self._failures = 0

    @property
    def attests(self) -> frozenset[str]:
        """What the caller guarantees."""
        return self._attests

    @property
    def active(self) -> bool:
        """Whether the table is in use at all."""
        return self.mode is not Mode.OFF and self.router.agreed_on != INACTIVE

    @property
    def status(self) -> RouterStatus:
        """The router's, whose ``recapture`` goes by the kernels that captured calls really ran."""
        return self.captures.amend(self.router.status)

    def recorded(self, chooser: Chooser, batch_size: int, q_len: int, ran: str) -> None:
        """A call that ran ``ran`` is in a CUDA graph now. Never raises."""
        try:
            self.captures.add(chooser, batch_size, q_len, ran)
        except Exception as error:
            self.once("capture", f"{self.engine}: a captured call is not noted: {told(error)}")

    def chooser(
        self,
        shape: Shape,
        dtypes: DTypes,
        *,
        max_context: int,
        stock: str,
        fallback: str,
        deployable: frozenset[str],
        pad_value: int | None = None,
        sizes: tuple[int, ...] = (),
        q_lens: tuple[int, ...] = (),
    ) -> Chooser:
        """Bind one attention layer kind, and say in one line what that means for the captured ``sizes``.

        Raises:
            RuntimeError: the table was reloaded in each of some tries.
        """
        for _ in range(_TRIES):
            generation = self.router.generation
            table = self.router.table
            bound = self.router.bind(
                shape, dtypes, max_context=max_context, attests=self._attests, pad_value=pad_value
            )
            # rows and fallback are to be those of the table that the binding answers from
            if self.router.generation == generation and self.router.table is table:
                break
        else:
            raise RuntimeError("the table is being reloaded over and over")
        entries = [
            entry
            for entry in (table.entries if table is not None else ())
            if entry.shape == shape and entry.dtypes == dtypes
        ]
        offered = fallback
        if entries:
            fallback = entries[0].fallback
        quarantine = table.quarantine if table is not None else ()
        made = Chooser(
            bound,
            stock=stock,
            fallback=fallback,
            deployable=deployable,
            miss=self.miss,
            kind=(shape, dtypes, max_context),
            quarantine=tuple(item for item in quarantine if item.of_kind(shape, dtypes)),
            unsafe=table.unsafe if table is not None else (),
            again=partial(
                self.chooser,
                shape,
                dtypes,
                max_context=max_context,
                stock=stock,
                fallback=offered,
                deployable=deployable,
                pad_value=pad_value,
                sizes=sizes,
                q_lens=q_lens,
            ),
            ends=row_ends(table, shape, dtypes, max_context),
        )
        sizes = sizes or tuple(sorted({size for entry in entries for size in entry.batch_size}))
        q_lens = q_lens or tuple(sorted({entry.q_len for entry in entries}))
        kind = f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim} {dtypes.q}/{dtypes.kv}"
        state = f"{self.router.status.state}, {self.router.digest}"
        what = share(made, sizes, q_lens, stock) if entries else "this kind is not in the table"
        self.once(
            f"kind {shape} {dtypes}",
            f"{self.engine}: {self.router.status.path}: {state}, {self.mode.value}, misses get "
            f"{self.miss.value}; {kind}, max context {max_context}: {what}",
            start_level(),
        )
        return made

    def note(self, choice: Choice, stock: str, cell: object) -> None:
        """Count one call, and log the first of its sort; ``cell`` is not made a text for the others."""
        called = choice.route or stock
        key = (called, choice.why)
        self.counts[key] += 1
        if self.counts[key] == 1:
            word = "would call" if self.mode is Mode.OBSERVE else "calls"
            level = logging.INFO if choice.decided else logging.WARNING
            self.once(
                f"note {called} {choice.why}",
                f"{self.engine}: {word} {called} at {cell}, {choice.why}: {choice.detail} "
                "(further ones are counted)",
                level,
            )

    def calling(self, route: str, cell: str) -> None:
        """A route that the table chose is about to be called: on disk first."""
        if self.captured is not None:
            self.captured.add(route, cell)

    def failed(self, error: BaseException, where: str) -> None:
        """Our own code raised: stock from here on for this call, told once per place."""
        self._failures += 1
        self.once(f"failed {where}", f"{self.engine}: {where}: {told(error)}; the engine's own call is made")

    def saw(self, error: BaseException) -> bool:
        """An exception came out of a kernel's call; whether it is one that no retry survives."""
        return self.captured.saw(error) if self.captured is not None else deadly(error)


def capturing() -> bool:
    """Whether a CUDA graph is being recorded on this thread's stream."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def deadly(error: BaseException) -> bool:
    """Whether the CUDA context is dead after ``error``."""
    from autotune.engines.suspects import DEADLY

    return DEADLY.search(told(error)) is not None


def entered(
    engine: str, settings: Settings | None, register: Callable[[Settings], _Plugin | None]
) -> _Plugin | None:
    """What an engine's entry point does: ``register``, where there is something to do. Never raises."""
    try:
        settings = read_settings() if settings is None else settings
        if settings.problem:
            say(f"{engine}: {settings.problem}")
            return None
        if settings.mode is Mode.OFF or settings.table is None:
            return None
        return register(settings)
    except Exception as error:
        say(f"{engine}: off: {told(error)}")
        return None


def started(engine: str, settings: Settings, unfamiliar: Callable[[], str | None]) -> Runtime | None:
    """:func:`start`; an engine that reads otherwise than those the hooks were written against is observed."""
    runtime = start(settings, engine)
    if runtime is not None and runtime.mode is Mode.ROUTE and (why := unfamiliar()):
        say(f"{engine}: {why}; observing only")
        runtime.mode = Mode.OBSERVE
    return runtime


def start(settings: Settings, engine: str, *, attests: Iterable[str] = ()) -> Runtime | None:
    """What the environment asks for; None where that is nothing, with one line where it cannot be had.

    Never raises. Where the table is not in use, the line says why, and the engine runs as without us.
    """
    try:
        return _start(settings, engine, attests)
    except Exception as error:
        say(f"{engine}: off: {told(error)}")
        return None


def _start(settings: Settings, engine: str, attests: Iterable[str]) -> Runtime | None:
    if settings.problem:
        say(f"{engine}: {settings.problem}")
        return None
    if settings.mode is Mode.OFF or settings.table is None:
        return None
    facts = collected(settings.facts)
    path = find_table(settings.table, facts, engine) if settings.table.is_dir() else settings.table
    router = Router.load(path, facts=facts)
    if not router.status.active:
        say(f"{engine}: {path}: {router.status.reason}; {router.digest}; the engine runs as without a table")
        return None
    if router.table is not None and router.table.policy.engine != engine:
        say(
            f"{engine}: {path}: measured for engine {router.table.policy.engine}; off. Export one: "
            f"autotune export --engine {engine}"
        )
        return None
    captured = recorded(settings.state, engine, router)
    router.watch()
    traffic = None
    if settings.traffic is not None:
        from autotune.engines.traffic import Traffic

        traffic = Traffic(settings.traffic)
    return Runtime(
        router,
        engine=engine,
        mode=settings.mode,
        miss=settings.miss,
        attests=attests,
        captured=captured,
        traffic=traffic,
    )


def recorded(state: Path | None, engine: str, router: Router) -> Captured | None:
    """This process' crash record in ``state``, after telling what earlier ones left there. Never raises."""
    if state is None:
        return None
    from autotune.engines.suspects import Captured, find_suspects

    try:
        for suspect in find_suspects(state):
            say(f"{suspect}; see autotune suspects, withdraw with autotune quarantine")
    except Exception as error:  # what a dead process left turns nothing off
        say(f"{engine}: {state}: its suspects cannot be read: {told(error)}")
    return Captured(state, engine, table=router.status.path, digest=router.digest or "")


def collected(path: Path | str | os.PathLike[str] | None = None) -> Facts:
    """The facts of this process' own device, or those of a file.

    Raises:
        ValueError, HardwareError, NoDevice: they cannot be had; one line.
    """
    if path is not None:
        from autotune.router.facts import facts_from

        found = facts_from(path)
        if found is not None:
            return found
    from autotune.hardware import collect

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return collect(f"cuda:{torch.cuda.current_device()}")
    return collect()
