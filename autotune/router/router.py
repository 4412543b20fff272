"""``Router``: a table, compared with the facts of this machine, and the bindings made from it."""

from __future__ import annotations

import os
from _thread import RLock  # as ``threading.RLock``, whose import a serving process need not pay
from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakSet

from autotune.domain.dtypes import DTypes
from autotune.domain.shape import Shape
from autotune.router.binding import Binding, DTypesLike, ShapeLike, line_of
from autotune.router.bound import Bound
from autotune.router.explanation import Explanation, Why
from autotune.router.facts import FactsLike
from autotune.router.file_mark import FileMark
from autotune.router.log import logger
from autotune.router.miss_log import MissLog
from autotune.router.plan import Plan
from autotune.router.state import State
from autotune.router.status import INACTIVE, Recapture, RouterStatus
from autotune.table.model import RoutingTable
from autotune.table.source import signature_path

if TYPE_CHECKING:
    from autotune.router.watch import Watch


class Router:
    """Names a kernel other than the fallback only where a table proves it, on exactly this machine.

    No method raises. May be shared between threads: look-ups take no lock; :meth:`poll` puts another table in
    the place of this one with one assignment a binding.
    """

    __slots__ = (
        "__weakref__",
        "_bounds",
        "_facts",
        "_fallback",
        "_generation",
        "_lock",
        "_log",
        "_mark",
        "_path",
        "_pinned",
        "_polled",
        "_refused",
        "_state",
        "_suspended",
        "_watch",
    )

    def __init__(self, table: RoutingTable | None, status: RouterStatus, fallback: str) -> None:
        """Use :meth:`load`; a router made here has no file to reload."""
        self._fallback = fallback
        self._state = State(table, status, fallback)
        self._path: object = None
        self._facts: FactsLike = None
        self._mark = FileMark((), True)
        self._polled = monotonic()
        self._refused = ""
        self._suspended = ""
        self._generation = 0
        self._log = MissLog()
        # Taken by bind, poll and capture, never by a look-up. Re-entrant: log handlers are foreign code.
        self._lock = RLock()
        self._bounds: WeakSet[Bound] = WeakSet()
        # What was captured outlives the caller's interest in its Bound.
        self._pinned: set[Bound] = set()
        self._watch: Watch | None = None

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, facts: FactsLike = None, fallback: str = "fallback"
    ) -> Router:
        """Read and check a table. Never raises: whatever is wrong makes an inactive router.

        Args:
            path: the table's file.
            facts: what ``autotune.hardware.collect()`` found here, as ``Facts``, its dictionary, or the path
                of a JSON file of it. None leaves the router inactive: it compares facts, it gathers none.
            fallback: the answer where the table has none of its own (inactive, or a shape it lacks).
        """
        fallback = fallback if isinstance(fallback, str) else "fallback"
        mark = _mark(path)  # before the file is read: a change in between is seen by the next poll
        state = State.read(path, facts, fallback)
        router = cls(None, state.status, fallback)
        router._state = state
        router._path = _absolute(path)
        router._facts = _absolute(facts)  # type: ignore[assignment]
        router._mark = mark
        _log_load(state.status)
        return router

    @property
    def status(self) -> RouterStatus:
        """Active or not and why, what was refused at a reload, and which captured calls are out of date."""
        status = self._state.status
        if self._suspended:
            status = status._replace(state=INACTIVE, reason=self._suspended)
        stale = self._stale()
        reason = status.reason
        if self._refused:
            reason += f"; the file's newest contents are not in use: {self._refused}"
        if stale:
            reason += f"; recapture needed: {stale[0]}"
            reason += f" (and {len(stale) - 1} more)" if len(stale) > 1 else ""
        return status._replace(reason=reason, refused=self._refused, recapture=stale)

    @property
    def digest(self) -> str | None:
        """The table's digest, ``sha256:...``, for ranks to compare; None where the table is not sound."""
        return self._state.status.digest

    @property
    def agreed_on(self) -> str:
        """What ranks must have in common: the digest of a table in use, or ``inactive``.

        A suspension does not count: it is what ranks that differ impose on each other.
        """
        status = self._state.status
        return status.digest if status.active and status.digest else INACTIVE

    @property
    def generation(self) -> int:
        """Counts the times that answers may have changed: for callers that keep some. One attribute read."""
        return self._generation

    @property
    def table(self) -> RoutingTable | None:
        """The table as loaded, also where the router is inactive; None if it could not be read."""
        return self._state.table

    def bind(
        self,
        shape: ShapeLike,
        dtypes: DTypesLike,
        *,
        max_context: int,
        attests: Iterable[str] = frozenset(),
        pad_value: int | None = None,
    ) -> Bound:
        """Prebuild the answers for one attention layer kind. Call once, outside the hot path.

        Args:
            shape: per-rank shape, or its dictionary.
            dtypes: what the engine holds: q, KV cache and output.
            max_context: the engine's maximum context in tokens; must lie within the proven one.
            attests: requirements that the engine guarantees, such as ``finite_pool``.
            pad_value: KV length of the rows with which the engine pads a batch; must be the table's. None
                leaves it to the table's engine (``table.policy``), whose own it is.
        """
        binding: Binding | str
        try:
            binding = Binding.of(shape, dtypes, max_context, attests, pad_value)
        except Exception as error:
            binding = line_of(error)
        with self._lock:
            bound = Bound(self, binding, self._plan(binding))
            self._bounds.add(bound)
        return bound

    def explain(
        self,
        shape: ShapeLike,
        dtypes: DTypesLike,
        max_context: int,
        batch_size: int,
        q_len: int,
        max_kv_len: int | None = None,
        attests: Iterable[str] = frozenset(),
        pad_value: int | None = None,
    ) -> Explanation:
        """What :meth:`bind` and ``route`` would answer, with the reason and the proof."""
        bound = self.bind(shape, dtypes, max_context=max_context, attests=attests, pad_value=pad_value)
        return bound.explain(batch_size, q_len, max_kv_len)

    def poll(self, min_interval_s: float = 1.0) -> bool:
        """Look whether the file has changed, and take up a sound new table. Never raises.

        Call it between steps, never in one: mostly it compares two numbers, once in ``min_interval_s`` it
        asks the file system for the file's times, and after a change it reads the table, some milliseconds.
        New contents that are unsound, measured elsewhere or gone leave the table in use as it is; ``status``
        says so. Bindings follow by themselves; what a CUDA graph has recorded does not (``Bound.capture``).

        Returns:
            Whether another table is in use now.
        """
        now = monotonic()
        if now - self._polled < min_interval_s or self._path is None:
            return False
        if not self._lock.acquire(blocking=False):
            return False  # another thread is at it
        try:
            self._polled = now
            return self._reload()
        except Exception as error:
            self._refuse(line_of(error))
            return False
        finally:
            self._lock.release()

    def watch(self, interval_s: float = 1.0) -> Watch:
        """:meth:`poll` in a daemon thread of this process; one a router. ``stop()`` ends it.

        Call it after the last fork: threads and locks do not survive one.
        """
        from autotune.router.watch import Watch

        with self._lock:
            if self._watch is None or not self._watch.alive:
                self._watch = Watch(self, interval_s)
            return self._watch

    def suspend(self, reason: str) -> None:
        """Answer every call with the fallback until :meth:`resume`, as where ranks hold different tables."""
        with self._lock:
            self._suspended = reason or "suspended"
            self._apply()
        _log_load(self.status)

    def resume(self) -> None:
        """End a suspension; the table in use answers again."""
        with self._lock:
            if not self._suspended:
                return
            self._suspended = ""
            self._apply()
        _log_load(self.status)

    def _reload(self) -> bool:
        mark = _mark(self._path)
        if mark.stats == self._mark.stats and self._mark.settled:
            return False
        self._mark = mark
        state, before = State.read(self._path, self._facts, self._fallback), self._state
        if not state.status.active:
            if before.status.active:
                self._refuse(state.status.reason)
                return False
            changed = (state.status.reason, state.status.digest) != (
                before.status.reason,
                before.status.digest,
            )
            self._state = state
            if changed:
                self._apply()
                _log_load(state.status)
            return False
        self._refused = ""
        if before.status.active and state.status.digest == before.status.digest:
            return False
        self._state = state
        self._apply()
        _log_load(self.status)
        return True

    def _apply(self) -> None:
        # All plans first: from then on it is one assignment a binding.
        plans = [(bound, self._plan(bound._binding)) for bound in list(self._bounds)]
        for bound, plan in plans:
            bound._plan = plan
        self._generation += 1

    def _plan(self, binding: Binding | str) -> Plan:
        if self._suspended:
            return Plan.constant(Explanation(self._fallback, False, False, Why.INACTIVE, self._suspended))
        plan = self._state.plan(binding)
        if plan.always is not None and plan.always.why != Why.INACTIVE:  # that is logged with the table
            self._log(plan.always)
        if plan.assumes:
            self._log.assumed(plan.assumes)
        return plan

    def _refuse(self, reason: str) -> None:
        if reason != self._refused:
            self._refused = reason
            try:
                logger().warning("kept the table in use, %s: %s", self._state.status.digest, reason)
            except Exception:  # a handler or filter is foreign code
                return

    def _stale(self) -> tuple[Recapture, ...]:
        found = []
        for bound in list(self._pinned):
            for (size, q_len, longest), captured in list(bound._captured.items()):
                now = bound._plan.find(size, q_len, longest)
                if now.answer != captured and isinstance(bound._binding, Binding):
                    shape, dtypes = bound._binding.shape, bound._binding.dtypes
                    found.append(
                        Recapture(shape, dtypes, size, q_len, longest, captured, now.answer, now.why)
                    )
        return tuple(sorted(found, key=_order))

    def _missed(self, found: Explanation) -> None:
        self._log(found)

    def _pin(self, bound: Bound) -> None:
        with self._lock:
            self._pinned.add(bound)

    def _unpin(self, bound: Bound) -> None:
        with self._lock:
            self._pinned.discard(bound)


def _order(each: Recapture) -> tuple[Shape, DTypes, int, int, int]:
    return each.shape, each.dtypes, each.q_len, each.batch_size, each.max_kv_len or 0


def _absolute(path: object) -> object:
    # The process may go to another folder before the next look.
    try:
        return os.path.abspath(path)  # type: ignore[call-overload]  # noqa: PTH100 - as in file_mark
    except Exception:
        return path


def _mark(path: object) -> FileMark:
    return FileMark.of(path, signature_path(path))


def _log_load(status: RouterStatus) -> None:
    try:
        if status.active:
            logger().info("active: %s: %s; %s", status.path, status.reason, status.digest)
        else:
            logger().warning("inactive, every answer is the fallback: %s: %s", status.path, status.reason)
    except Exception:  # a handler or filter is foreign code
        return
