"""A table as it was read, compared with the facts of this machine, and the plans made from it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import mismatches
from autotune.domain.shape import Shape
from autotune.router.binding import Binding, line_of, text_of
from autotune.router.explanation import Explanation, Why
from autotune.router.facts import FactsLike, facts_from
from autotune.router.plan import Plan
from autotune.router.status import ACTIVE, INACTIVE, RouterStatus
from autotune.table.load import load_table
from autotune.table.model import Entry, RoutingTable
from autotune.table.quarantine import apply_quarantine


class State:
    """One reading of a table's file. Never changes; a reload makes another.

    Attributes:
        table: as loaded, also where it belongs to another machine; None if it could not be read.
        status: whether it is in use, and why not.
    """

    __slots__ = ("_entries", "_fallback", "status", "table")

    def __init__(self, table: RoutingTable | None, status: RouterStatus, fallback: str) -> None:
        self.table = table
        self.status = status
        self._fallback = fallback
        self._entries: dict[tuple[Shape, DTypes], list[Entry]] = {}
        if table is not None and status.active:
            for entry in apply_quarantine(table).entries:
                self._entries.setdefault((entry.shape, entry.dtypes), []).append(entry)

    @classmethod
    def read(cls, path: object, facts: FactsLike, fallback: str) -> State:
        """Read and check a table. Never raises: whatever is wrong makes an inactive state."""
        table, digest, name = None, None, text_of(path)
        try:
            table = load_table(os.fspath(path))  # type: ignore[call-overload]
            digest = table.digest
            reason = _why_not_here(table, facts)
            status = RouterStatus(INACTIVE if reason else ACTIVE, reason or _summary(table), name, digest)
            return cls(table, status, fallback)
        except Exception as error:
            return cls(table, RouterStatus(INACTIVE, line_of(error), name, digest), fallback)

    def plan(self, binding: Binding | str) -> Plan:
        """The answers for a binding, or for one that is no binding (then ``binding`` says why not)."""
        if self.table is None or not self.status.active:
            return self._always(Why.INACTIVE, self.status.reason)
        if isinstance(binding, str):
            return self._always(Why.BAD_INPUT, binding)
        try:
            return self._plan(self.table, binding)
        except Exception as error:
            return self._always(Why.BAD_INPUT, line_of(error))

    def _plan(self, table: RoutingTable, binding: Binding) -> Plan:
        known = self._entries.get((binding.shape, binding.dtypes))
        if known is None:
            return self._always(Why.SHAPE, f"no entry for {binding.shape} {binding.dtypes}")
        # Entries of one shape may differ in fallback; where they do, only the caller's own word is safe.
        names = {entry.fallback for entry in known}
        fallback = names.pop() if len(names) == 1 else self._fallback
        withdrawn = frozenset(
            item.route for item in table.quarantine if item.of_kind(binding.shape, binding.dtypes)
        )
        if fallback in withdrawn:
            fallback = self._fallback
        pad, proven_pad = binding.pad_value, table.policy.pad_value
        if pad is not None and pad != proven_pad:
            detail = f"padded rows of length {pad}; proven is {proven_pad}, with which engine "
            return self._always(Why.PAD_VALUE, f"{detail}{table.policy.engine} pads", fallback)
        within = _narrowest(known, binding.max_context)
        if not within:
            proven = max(entry.max_context for entry in known)
            detail = f"max_context {binding.max_context} exceeds the proven {proven}"
            return self._always(Why.MAX_CONTEXT, detail, fallback)
        return Plan.of(
            within,
            legend=table.legend,
            families=table.families,
            max_context=binding.max_context,
            attests=binding.attests,
            fallback=fallback,
            withdrawn=withdrawn,
            instead=self._fallback,
        )

    def _always(self, why: str, detail: str, fallback: str | None = None) -> Plan:
        return Plan.constant(Explanation(fallback or self._fallback, False, False, why, detail))


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
