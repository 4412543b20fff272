"""Real kernels, called as engines have called them by mistake.

``planted-live-<mistake>-in-<route>`` is that route, opened as always, with one thing changed between the
operands that a check made and what the kernel gets: lengths, page table, output, workspace or query. The
kernel is right and so are the operands; what comes of the call shows what a check sees of the mistake, on the
device in use. The same changes, as functions of a step, show what the contract of a call says before it.

Eager only: what is changed is made anew for each step, at addresses that a captured graph would not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from autotune.domain.route_name import EMULATED
from autotune.routes.base import Capture, Family, Need

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.arithmetic import Arithmetic
    from autotune.routes.base import Allocate, Capacity, Route, Session, Step

PREFIX = "planted-live-"
_IN = "-in-"
XQA = "xqa-decode"
# Ids that no pool of a check has. The last one is as far as an int32 reaches.
PAST_THE_POOL = 63
FARTHEST = 2**31 - 1
# Left by a launch that was aborted: each counter has counted one CTA.
LEFT_COUNT = 1
MISSING_ROWS = 2


class Mistake:
    """What is changed; this one changes nothing. Its docstring says how the mistake is made.

    Attributes:
        routes: the only routes that it can be made in; () for all.
    """

    routes: tuple[str, ...] = ()

    @property
    def made(self) -> str:
        """How, in a line."""
        return " ".join((self.__doc__ or "").split())

    def step(self, step: Step, capacity: Capacity, allocate: Allocate) -> Step:
        """What the route is prepared with."""
        return step

    def out(self, out: torch.Tensor, allocate: Allocate) -> torch.Tensor:
        """Where the route writes."""
        return out

    def opened(self, session: Any) -> None:
        """What is done to the route's session before its first step."""

    def arguments(self, arguments: dict[str, Any], step: Step) -> None:
        """What is done to the keywords of the library's function, where a session calls one."""


MISTAKES: dict[str, Mistake] = {}


def _plant(name: str) -> Callable[[type[Mistake]], type[Mistake]]:
    def register(mistake: type[Mistake]) -> type[Mistake]:
        MISTAKES[name] = mistake()
        return mistake

    return register


def _table(step: Step, allocate: Allocate, width: int | None = None) -> torch.Tensor:
    """A copy of the step's page table, its first ``width`` columns, as an operand of its own."""
    columns = step.page_table.shape[1] if width is None else width
    table = allocate("page_table_built", (step.batch_size, columns), torch.int32)
    table.copy_(step.page_table[:, :columns])
    return table


def _lengths(step: Step, allocate: Allocate, kv_lens: torch.Tensor) -> Step:
    """The step with other lengths, on the host too where it has them there."""
    seq_lens = allocate("seq_lens_built", (step.batch_size,), torch.int32)
    seq_lens.copy_(kv_lens)
    host = None if step.host_kv_lens is None else tuple(seq_lens.tolist())
    return replace(step, seq_lens=seq_lens, host_kv_lens=host)


@_plant("narrow-table")
class NarrowTable(Mistake):
    """The page table is built from lengths without the new tokens: too narrow where they begin a page."""

    def step(self, step: Step, capacity: Capacity, allocate: Allocate) -> Step:
        """See :class:`Mistake`."""
        page = capacity.column.shape.page_size
        width = max(1, -(-(int(step.seq_lens.max()) - step.q_len) // page))
        return replace(step, page_table=_table(step, allocate, width))


@_plant("old-lengths")
class OldLengths(Mistake):
    """``seq_lens`` are what the cache held before this step, at least 1: the new tokens are left out."""

    def step(self, step: Step, capacity: Capacity, allocate: Allocate) -> Step:
        """See :class:`Mistake`."""
        return _lengths(step, allocate, (step.seq_lens - step.q_len).clamp(min=1))


@_plant("empty-row")
class EmptyRow(Mistake):
    """The last request's length is 0 although it is live."""

    def step(self, step: Step, capacity: Capacity, allocate: Allocate) -> Step:
        """See :class:`Mistake`."""
        lens = step.seq_lens.clone()
        lens[-1] = 0
        return _lengths(step, allocate, lens)


class _OtherPage(Mistake):
    """The first page of the last request has an id that the pool does not have."""

    def page(self, capacity: Capacity) -> int:
        """The id."""
        raise NotImplementedError

    def step(self, step: Step, capacity: Capacity, allocate: Allocate) -> Step:
        """See :class:`Mistake`."""
        table = _table(step, allocate)
        table[-1, 0] = self.page(capacity)
        return replace(step, page_table=table)


@_plant("page-past-the-pool")
class PagePastThePool(_OtherPage):
    """The last request's first page lies 64 pages past the pool's last one."""

    def page(self, capacity: Capacity) -> int:
        """See :class:`_OtherPage`."""
        return capacity.num_pages + PAST_THE_POOL


@_plant("page-farthest")
class PageFarthest(_OtherPage):
    """The last request's first page is 2^31 - 1."""

    def page(self, capacity: Capacity) -> int:
        """See :class:`_OtherPage`."""
        return FARTHEST


@_plant("page-minus-1")
class PageMinus1(_OtherPage):
    """The last request's first page is -1, which engines write into entries that are not live."""

    def page(self, capacity: Capacity) -> int:
        """See :class:`_OtherPage`."""
        return -1


@_plant("page-minus-100000")
class PageMinus100000(_OtherPage):
    """The last request's first page is -100000."""

    def page(self, capacity: Capacity) -> int:
        """See :class:`_OtherPage`."""
        return -100_000


@_plant("small-output")
class SmallOutput(Mistake):
    """The output has two rows fewer than the query."""

    def out(self, out: torch.Tensor, allocate: Allocate) -> torch.Tensor:
        """See :class:`Mistake`."""
        return allocate("small_out", (max(1, out.shape[0] - MISSING_ROWS), *out.shape[1:]), out.dtype)


@_plant("dirty-semaphores")
class DirtySemaphores(Mistake):
    """The workspace's head holds ones where the kernel counts from zero, as an aborted launch leaves it."""

    routes = (XQA,)

    def opened(self, session: Any) -> None:
        """See :class:`Mistake`."""
        dirty(session._workspace)


@_plant("strided-query")
class StridedQuery(Mistake):
    """A slice of a packed QKV projection goes to the kernel as it is, not copied: it gets no query stride."""

    routes = (XQA, "fmha-v2")

    def arguments(self, arguments: dict[str, Any], step: Step) -> None:
        """See :class:`Mistake`."""
        if "qkv" in arguments:
            arguments["qkv"] = (step.q, *arguments["qkv"][1:])
        else:
            arguments["query"] = step.q


def dirty(workspace: torch.Tensor) -> None:
    """Write ones into the semaphores of an XQA workspace, uint8 [bytes]."""
    from autotune.routes.flashinfer.xqa import SEMAPHORE_BYTES

    workspace[:SEMAPHORE_BYTES].view(torch.int32).fill_(LEFT_COUNT)


def name_of(mistake: str, route: str) -> str:
    """The name of ``mistake`` in ``route``."""
    return f"{PREFIX}{mistake}{_IN}{route}"


@cache
def _parts(name: str) -> tuple[Mistake, Route]:
    """The mistake and the route of a name.

    Raises:
        ValueError: there is no such mistake or route.
    """
    from autotune.routes import registry

    mistake, _, route = name.removeprefix(PREFIX).partition(_IN)
    if not name.startswith(PREFIX) or mistake not in MISTAKES or not route:
        raise ValueError(
            f"no planted route is called {name!r}; there are {PREFIX}MISTAKE{_IN}ROUTE, with a mistake of "
            f"{', '.join(MISTAKES)}"
        )
    if route.startswith(EMULATED):
        from autotune.routes.flashinfer.emulation.route import emulated

        return MISTAKES[mistake], emulated(route)
    return MISTAKES[mistake], registry.get(route)


@dataclass(frozen=True)
class PlantedLive:
    """A route with a mistake, by name; picklable.

    Raises:
        ValueError: no mistake, or no route, has that name.
    """

    name: str

    capture = Capture.NO

    def __post_init__(self) -> None:
        _parts(self.name)

    @property
    def mistake(self) -> Mistake:
        """What is changed."""
        return _parts(self.name)[0]

    @property
    def base(self) -> Route:
        """The route."""
        return _parts(self.name)[1]

    @property
    def family(self) -> Family:
        """The route's."""
        return self.base.family

    @property
    def needs(self) -> frozenset[Need]:
        """The route's."""
        return self.base.needs

    @property
    def deterministic(self) -> bool:
        """The route's."""
        return self.base.deterministic

    @property
    def version(self) -> int:
        """The route's."""
        return self.base.version

    def arithmetic(self, column: Column, facts: Facts) -> Arithmetic:
        """The route's: the mistake is held to its bound."""
        from autotune.routes.arithmetic import Arithmetic

        declared = getattr(self.base, "arithmetic", None)
        found = declared(column, facts) if callable(declared) else None
        return found if isinstance(found, Arithmetic) else Arithmetic()

    def available(self, column: Column, facts: Facts) -> str | None:
        """Whether the route's kernels are here."""
        available = getattr(self.base, "available", None)
        reason = available(column, facts) if callable(available) else None
        return None if reason is None else str(reason)

    def supports(self, column: Column, facts: Facts) -> str | None:
        """What the route supports, where the mistake can be made in it."""
        only = self.mistake.routes
        if only and self.base.name not in only:
            return f"this mistake is made in {', '.join(only)}, not in {self.base.name}"
        return self.base.supports(column, facts)

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """The route's session, with the mistake. Raises what the route's does."""
        return Mistaken(self.base.open(capacity, allocate), self.mistake, capacity, allocate)


class Mistaken:
    """A session of a real route with ``mistake`` before it."""

    def __init__(self, session: Session, mistake: Mistake, capacity: Capacity, allocate: Allocate) -> None:
        self._session, self._mistake = session, mistake
        self._capacity, self._allocate = capacity, allocate
        self._step: Step | None = None
        mistake.opened(session)
        inner: Any = session
        if hasattr(inner, "_function"):
            function = inner._function

            def call(*args: Any, **arguments: Any) -> Any:
                assert self._step is not None
                mistake.arguments(arguments, self._step)
                return function(*args, **arguments)

            inner._function = call

    def prepare(self, step: Step) -> None:
        """See ``Session.prepare``."""
        self._step = self._mistake.step(step, self._capacity, self._allocate)
        self._session.prepare(self._step)

    def run(self, out: torch.Tensor) -> None:
        """See ``Session.run``."""
        self._session.run(self._mistake.out(out, self._allocate))

    def close(self) -> None:
        """See ``Session.close``."""
        self._session.close()
        self._step = None
