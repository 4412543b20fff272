"""``Router``: a table, compared with the facts of this machine, and the bindings made from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import mismatches
from autotune.domain.shape import Shape
from autotune.router.bound import Bound, MissLog, as_integer
from autotune.router.explanation import Explanation, Why
from autotune.router.facts import FactsLike, facts_from
from autotune.router.log import logger
from autotune.router.status import ACTIVE, INACTIVE, RouterStatus
from autotune.table.load import load_table
from autotune.table.model import Entry, RoutingTable
from autotune.table.quarantine import apply_quarantine

ShapeLike = Shape | Mapping[str, Any]
DTypesLike = DTypes | Mapping[str, Any]


class Router:
    """Names a kernel other than the fallback only where a table proves it, on exactly this machine.

    No method raises. Instances are immutable apart from remembering which kinds of miss were logged, and
    may be shared between threads.
    """

    __slots__ = ("_entries", "_fallback", "_log", "_status", "_table")

    def __init__(self, table: RoutingTable | None, status: RouterStatus, fallback: str) -> None:
        """Use :meth:`load`."""
        self._table = table
        self._status = status
        self._fallback = fallback
        self._log = MissLog()
        self._entries: dict[tuple[Shape, DTypes], list[Entry]] = {}
        if table is not None and status.active:
            for entry in apply_quarantine(table).entries:
                self._entries.setdefault((entry.shape, entry.dtypes), []).append(entry)

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
        name = _text(path)
        table, digest = None, None
        try:
            table = load_table(os.fspath(path))
            digest = table.digest
            reason = _why_not_here(table, facts)
            state = INACTIVE if reason else ACTIVE
            status = RouterStatus(state, reason or _summary(table), name, digest)
            router = cls(table, status, fallback)
        except Exception as error:
            status = RouterStatus(INACTIVE, _line(error), name, digest)
            router = cls(table, status, fallback)
        _log_load(status)
        return router

    @property
    def status(self) -> RouterStatus:
        """Active or not, and why."""
        return self._status

    @property
    def digest(self) -> str | None:
        """The table's digest, ``sha256:...``, for ranks to compare; None where the table is not sound."""
        return self._status.digest

    @property
    def table(self) -> RoutingTable | None:
        """The table as loaded, also where the router is inactive; None if it could not be read."""
        return self._table

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
        try:
            return self._bind(shape, dtypes, max_context, attests, pad_value)
        except Exception as error:
            return self._always(Why.BAD_INPUT, _line(error))

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

    def _bind(
        self,
        shape: ShapeLike,
        dtypes: DTypesLike,
        max_context: int,
        attests: Iterable[str],
        pad_value: int | None,
    ) -> Bound:
        if self._table is None or not self._status.active:
            return self._always(Why.INACTIVE, self._status.reason)
        shape, dtypes = _shape(shape), _dtypes(dtypes)
        context = as_integer(max_context)
        if context is None or context < 1:
            raise ValueError(f"max_context must be a positive integer, not {_text(max_context)}")
        pad = None if pad_value is None else as_integer(pad_value)
        if pad_value is not None and (pad is None or pad < 0):
            raise ValueError(f"pad_value must be None or a KV length in tokens, not {_text(pad_value)}")
        known = self._entries.get((shape, dtypes))
        if known is None:
            return self._always(Why.SHAPE, f"no entry for {shape} {dtypes}")
        # Entries of one shape may differ in fallback; where they do, only the caller's own word is safe.
        names = {entry.fallback for entry in known}
        fallback = names.pop() if len(names) == 1 else self._fallback
        proven_pad = self._table.policy.pad_value
        if pad is not None and pad != proven_pad:
            engine = self._table.policy.engine
            detail = f"padded rows of length {pad}; proven is {proven_pad}, with which engine {engine} pads"
            return self._always(Why.PAD_VALUE, detail, fallback)
        within = _narrowest(known, context)
        if not within:
            proven = max(entry.max_context for entry in known)
            detail = f"max_context {context} exceeds the proven {proven}"
            return self._always(Why.MAX_CONTEXT, detail, fallback)
        return Bound.of(
            within,
            legend=self._table.legend,
            families=self._table.families,
            max_context=context,
            attests=_attested(attests),
            fallback=fallback,
            log=self._log,
        )

    def _always(self, why: str, detail: str, fallback: str | None = None) -> Bound:
        answer = Explanation(fallback or self._fallback, False, False, why, detail)
        if why != Why.INACTIVE:  # that was logged when the table was loaded
            self._log(answer)
        return Bound.always(answer)


def _why_not_here(table: RoutingTable, facts: FactsLike) -> str:
    here = facts_from(facts)
    if here is None:
        return "no facts of this machine were given; pass facts=autotune.hardware.collect()"
    found = mismatches(table.facts, here)
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"the table was measured elsewhere: {found[0]}{more}; run autotune on this machine"


def _summary(table: RoutingTable) -> str:
    name = table.facts.hardware.get("name")
    return f"{len(table.entries)} entries measured on {name} for engine {table.policy.engine}"


def _narrowest(entries: Iterable[Entry], max_context: int) -> list[Entry]:
    """Per q_len the entries of the least proven max context that holds the engine's."""
    holding = [entry for entry in entries if entry.q_len <= max_context <= entry.max_context]
    least: dict[int, int] = {}
    for entry in holding:
        least[entry.q_len] = min(entry.max_context, least.get(entry.q_len, entry.max_context))
    return [entry for entry in holding if entry.max_context == least[entry.q_len]]


def _shape(given: ShapeLike) -> Shape:
    # Also a Shape is rebuilt: an enum member equals its string but hashes differently.
    fields = given.to_dict() if isinstance(given, Shape) else dict(given)
    return Shape.from_dict({key: _plain(value) for key, value in fields.items()})


def _dtypes(given: DTypesLike) -> DTypes:
    fields = given.to_dict() if isinstance(given, DTypes) else dict(given)
    return DTypes.from_dict({key: _plain(value) for key, value in fields.items()})


def _attested(given: Iterable[str]) -> frozenset[str]:
    listed = [given] if isinstance(given, str) else given or ()
    return frozenset(_plain(need) for need in listed)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _line(error: Exception) -> str:
    text = " ".join(_text(error).split())
    return text[:400] or type(error).__name__


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return type(value).__name__


def _log_load(status: RouterStatus) -> None:
    try:
        if status.active:
            logger().info("active: %s: %s; %s", status.path, status.reason, status.digest)
        else:
            logger().warning("inactive, every answer is the fallback: %s: %s", status.path, status.reason)
    except Exception:  # a handler or filter is foreign code
        return
