"""What one call gets: the engine's own kernel, or another one, by the table and the policy for misses.

The router answers with a route or with the fallback and a reason. An engine has a third thing, its stock
kernel, which is often the very candidate. So reasons are sorted here:

- the table *decides*: a proven route; the fallback because the candidate is not faster, unsafe, or
  quarantined. That is followed, whatever the policy says.
- the table is silent (unproven, another shape, another batch size): a *miss*; the policy says what it gets.
- no route is proven safe there, the fallback included: a miss that stays stock, since no kernel is better
  known than the engine's own.
- the KV length is not known (under graph capture) and the rows disagree between proven answers: what is
  right for short requests would be wrong for long ones, so no single answer is proven. A miss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.engines.environment import Miss
from autotune.engines.log import told
from autotune.router.explanation import Why

if TYPE_CHECKING:
    from collections.abc import Callable

    from autotune.domain.dtypes import DTypes
    from autotune.domain.shape import Shape
    from autotune.router.bound import Bound
    from autotune.table.model import Quarantine, RoutingTable, Unsafe

MIXED = "rows_disagree"
NOT_DEPLOYABLE = "not_deployable_here"
CONTEXT_FAILED = "context_path_failed"

_DECIDED = frozenset({Why.PROVEN_FASTER, Why.NOT_FASTER, Why.CANDIDATE_UNSAFE, Why.QUARANTINED})
# Where these stand in any row, no other row can make the answer better.
_DANGER = frozenset({Why.CANDIDATE_UNSAFE, Why.QUARANTINED})


class RefusedCallError(RuntimeError):
    """No kernel is left for a call: the engine's own is refused for it, and the one in its place failed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer for one (batch size, q_len, KV length).

    Attributes:
        route: the kernel to call; None leaves the engine's call alone.
        why: a value of ``Why``, or ``rows_disagree``, ``not_deployable_here``, ``context_path_failed``.
        detail: one line for a person.
        decided: the table decides it; else the policy for misses did.
        keeps_from: why the engine's own kernel must not answer the call if ``route`` fails: it is unsafe, in
            quarantine, or would be called against its contract. None: it is only slower, or not proven.
    """

    route: str | None
    why: str
    detail: str
    decided: bool
    keeps_from: str | None = None

    @property
    def moved(self) -> bool:
        """Whether another kernel than the engine's own is to be called."""
        return self.route is not None

    @property
    def refuses_stock(self) -> bool:
        """Whether the engine's own kernel is what the call is kept from."""
        return self.keeps_from is not None

    def left(self) -> Choice:
        """What it becomes in a process where the engine's context path failed once: the engine's own kernel,
        where that is not refused."""
        if not self.moved or self.refuses_stock:
            return self
        return Choice(None, CONTEXT_FAILED, f"{self.route} failed before in this process", decided=False)

    def refusal(self, stock: str, where: object, error: BaseException) -> RefusedCallError:
        """What to raise where :attr:`refuses_stock` and the kernel called instead raised ``error``."""
        return RefusedCallError(
            f"autotune: {where}: {stock} is refused here ({self.keeps_from}), and {self.route} in "
            f"its place failed: {told(error)}; AUTOTUNE_MODE=off takes autotune out"
        )


class Chooser:
    """Choices for one attention layer kind. Calls ``Bound`` only, so a reloaded table shows at once."""

    __slots__ = (
        "_bound",
        "_deployable",
        "_ends",
        "_fallback",
        "_fallback_withdrawn",
        "_miss",
        "_names_unsafe",
        "_names_withdrawn",
        "_stock_unsafe",
        "_stock_withdrawn",
        "again",
        "kind",
        "stock",
    )

    def __init__(
        self,
        bound: Bound,
        *,
        stock: str,
        fallback: str,
        deployable: frozenset[str],
        miss: Miss,
        kind: tuple[Shape, DTypes, int],
        again: Callable[[], Chooser],
        ends: tuple[int, ...] = (),
        quarantine: tuple[Quarantine, ...] = (),
        unsafe: tuple[Unsafe, ...] = (),
    ) -> None:
        """
        Args:
            stock: the kernel that the engine calls without us.
            fallback: the context kernel that a miss gets under ``Miss.FALLBACK``.
            deployable: kernels that this hook can call; ``stock`` is one without being named.
            kind: shape, dtypes and max context that it is for.
            again: makes it anew, from the table in use by then.
            ends: upper ends of the table's rows for this kind, for calls that do not know their KV length.
            quarantine: what of the table's is about this kind. A miss stays the engine's own where it has the
                fallback.
            unsafe: whom the table accuses, of any kind.
        """
        self._bound, self.stock, self._fallback = bound, stock, fallback
        self.kind, self.again = kind, again
        self._deployable, self._miss, self._ends = deployable, miss, ends
        self._fallback_withdrawn = tuple(item for item in quarantine if item.route == fallback)
        self._stock_withdrawn = tuple(item for item in quarantine if item.route == stock)
        # a table shows a few accusations of each route and kind: their cells are no bounds
        self._stock_unsafe = next((item.kind for item in unsafe if item.route == stock), None)
        self._names_withdrawn, self._names_unsafe = bool(quarantine), bool(unsafe)

    def choose(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> Choice:
        """Never raises: ``Bound`` does not."""
        found = self._bound.explain(batch_size, q_len, max_kv_len)
        if max_kv_len is None and found.why == Why.NOT_FASTER:
            rows = [self._bound.explain(batch_size, q_len, end) for end in self._ends if end >= q_len]
            if any(row.proven for row in rows) and not any(row.why in _DANGER for row in rows):
                return self._missed(
                    batch_size,
                    q_len,
                    MIXED,
                    "rows name different proven kernels and the KV length is unknown",
                )
        if found.why not in _DECIDED:
            if found.why == Why.NO_SAFE_ROUTE:
                return Choice(None, found.why, found.detail, decided=False)
            return self._missed(batch_size, q_len, found.why, found.detail)
        return self._deployed(batch_size, q_len, found.answer, found.why, found.detail, decided=True)

    def capture(self, batch_size: int, q_len: int, ran: str) -> None:
        """Tell the router of a captured call that ran what it named; it can note nothing else."""
        if self._bound.route(batch_size, q_len) == ran:
            self._bound.capture(batch_size, q_len)

    def refused(self, batch_size: int, q_len: int, detail: str) -> Choice:
        """What a call gets whose metadata break the contract; no fallback that is not proven safe there."""
        if self._bound.explain(batch_size, q_len).why == Why.NO_SAFE_ROUTE:
            return Choice(None, "contract", detail, decided=False)
        return self._missed(batch_size, q_len, "contract", detail)

    def _missed(self, batch_size: int, q_len: int, why: str, detail: str) -> Choice:
        if self._miss is Miss.STOCK or any(
            item.covers(q_len, batch_size, batch_size) for item in self._fallback_withdrawn
        ):
            return Choice(None, why, detail, decided=False)
        return self._deployed(batch_size, q_len, self._fallback, why, detail, decided=False)

    def _deployed(
        self, batch_size: int, q_len: int, route: str, why: str, detail: str, *, decided: bool
    ) -> Choice:
        if route == self.stock:
            return Choice(None, why, detail, decided)
        if route not in self._deployable:
            return Choice(None, NOT_DEPLOYABLE, f"{route}: {hint(route)}", decided=False)
        return Choice(route, why, detail, decided, self._against_stock(batch_size, q_len, why, detail))

    def _against_stock(self, batch_size: int, q_len: int, why: str, detail: str) -> str | None:
        """The letter is about the table's candidate, of which the engine's own kernel need not be the one."""
        if why == "contract":
            return detail
        for item in self._stock_withdrawn:
            if item.covers(q_len, batch_size, batch_size):
                return f"quarantined: {item.reason}"
        if why in (Why.CANDIDATE_UNSAFE, Why.PROVEN_FASTER) and self._stock_unsafe is not None:
            return f"unsafe: {self._stock_unsafe}"
        # where the table names nobody at all, the letter may well mean it
        named = {Why.QUARANTINED: self._names_withdrawn, Why.CANDIDATE_UNSAFE: self._names_unsafe}
        return None if named.get(why, True) else detail


def hint(route: str) -> str:
    """How an engine gets a kernel that a hook cannot call for it."""
    if route in ("fa2", "fa3", "fa2-decode"):
        return (
            "it is planned on the host before each step; start the engine with the backend that does so "
            "(SGLang: --attention-backend flashinfer or fa3; vLLM: --attention-backend FLASHINFER)"
        )
    return "this hook cannot call it; the engine's own call is left alone"


def row_ends(table: RoutingTable | None, shape: object, dtypes: object, max_context: int) -> tuple[int, ...]:
    """Upper ends of all rows of one kind's entries, cut at the engine's max context; ascending."""
    if table is None:
        return ()
    ends = {
        min(row.kv_high, max_context)
        for entry in table.entries
        if entry.shape == shape and entry.dtypes == dtypes
        for row in entry.routes.rows
    }
    return tuple(sorted(ends))


def share(chooser: Chooser, sizes: tuple[int, ...], q_lens: tuple[int, ...], stock: str) -> str:
    """``31 of 36 captured (batch, q_len) are decided, 12 of them away from xqa-decode``."""
    found = [chooser.choose(size, q_len) for q_len in q_lens for size in sizes]
    decided = [choice for choice in found if choice.decided]
    moved = sum(choice.moved for choice in decided)
    return (
        f"{len(decided)} of {len(found)} captured (batch, q_len) are decided by the table, "
        f"{moved} of them away from {stock}"
    )
