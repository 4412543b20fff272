"""The hot path: one attention layer kind, bound to its proven cells.

Every possible answer is built beforehand (``plan``); a look-up is two dictionary hits and an index by the KV
length's octave, or a bisection in an octave with more than one answer. It takes no lock, leaves no memory
behind and cannot raise. Containment, never nearest: a batch size is a captured one or lies strictly inside a
proven interval, a KV length lies inside a proven row.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from autotune.router.explanation import Explanation, Why
from autotune.router.integers import as_integer
from autotune.router.plan import Plan

if TYPE_CHECKING:
    from autotune.router.binding import Binding
    from autotune.router.router import Router


class Bound:
    """Answers for one shape, dtypes and max context. Made by ``Router.bind``.

    Stays valid when its router takes up another table: the look-ups that start after that see the new one.
    """

    __slots__ = ("__weakref__", "_binding", "_captured", "_plan", "_router")

    def __init__(self, router: Router, binding: Binding | str, plan: Plan) -> None:
        """Use ``Router.bind``; the router is the only one to replace ``_plan``."""
        self._router = router
        self._binding = binding
        self._plan = plan
        self._captured: dict[tuple[int, int, int | None], str] = {}

    # ``route`` and ``use_decode`` are written out: a call of a common function costs as much as the look-up.
    # ``type() is``: True == 1 and 1.0 == 1 would hit a dictionary; foreign numbers take the slow way. The
    # dictionary goes first, the types after: an object that imitates a key is still seen for what it is.

    def route(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> str:
        """The kernel to call: a proven route, or the fallback. Never raises.

        Args:
            batch_size: requests in the call (under CUDA graphs: the captured, padded size).
            q_len: query tokens per request.
            max_kv_len: the longest request's KV tokens, new ones included; None if it is not known on the
                host, as under graph capture. Then a route is named only if every row names it.
        """
        try:
            slot = self._plan.sizes[q_len][batch_size]
            if type(q_len) is int and type(batch_size) is int:
                if max_kv_len is None:
                    return slot[2]
                if type(max_kv_len) is int and max_kv_len > 0:
                    found = slot[8][(max_kv_len - 1).bit_length()]
                    if found is None:
                        found = slot[1][bisect_left(slot[0], max_kv_len)]
                    if found is not None:
                        return found
        except Exception:
            pass
        return self._find(batch_size, q_len, max_kv_len).answer

    def use_decode(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> bool:
        """Whether a route of the decode family is proven for this call. Never raises."""
        try:
            slot = self._plan.sizes[q_len][batch_size]
            if type(q_len) is int and type(batch_size) is int:
                if max_kv_len is None:
                    return slot[4]
                if type(max_kv_len) is int and max_kv_len > 0:
                    found = slot[9][(max_kv_len - 1).bit_length()]
                    if found is None:
                        found = slot[3][bisect_left(slot[0], max_kv_len)]
                    if found is not None:
                        return found
        except Exception:
            pass
        return self._find(batch_size, q_len, max_kv_len).use_decode

    def proven(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> str | None:
        """The proven route, or None where :meth:`route` answers the fallback. Never raises."""
        found = self._find(batch_size, q_len, max_kv_len)
        return found.answer if found.proven else None

    @property
    def assumes(self) -> tuple[str, ...]:
        """What proofs of the fallback assumed and this binding did not attest; nothing is withheld for it.

        Empty also where the table does not state it, and where the router is inactive.
        """
        return self._plan.assumes

    def explain(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> Explanation:
        """The answer with its reason and proof, from the same look-up as :meth:`route`. Never raises."""
        plan = self._plan
        found = self._find(batch_size, q_len, max_kv_len, plan)
        if plan.always is None and found is plan.misses.get(found.why):
            call = f"batch_size {_short(batch_size)}, q_len {_short(q_len)}, max_kv_len {_short(max_kv_len)}"
            return found._replace(detail=f"{call}: {found.detail}")
        return found

    def capture(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> str:
        """:meth:`route`, for a call that is being recorded into a CUDA graph. Never raises.

        The recorded kernel stays the same until the graph is recorded again, whatever a reload says. So the
        answer is noted, and ``Router.status`` says ``recapture needed`` while the table in use answers
        otherwise. Calling it again for the same arguments replaces the note.
        """
        answer = self.route(batch_size, q_len, max_kv_len)
        size, tokens, longest = as_integer(batch_size), as_integer(q_len), as_integer(max_kv_len)
        if size is not None and tokens is not None:
            self._captured[size, tokens, longest] = answer
            self._router._pin(self)
        return answer

    def release(self) -> None:
        """Forget every :meth:`capture`: the graphs are gone."""
        self._captured.clear()
        self._router._unpin(self)

    def _find(
        self, batch_size: object, q_len: object, max_kv_len: object, plan: Plan | None = None
    ) -> Explanation:
        plan = plan or self._plan
        size, tokens, longest = as_integer(batch_size), as_integer(q_len), as_integer(max_kv_len)
        if size is None or tokens is None or (longest is None and max_kv_len is not None):
            found = plan.misses[Why.BAD_INPUT]
        else:
            found = plan.find(size, tokens, longest)
        if plan.always is None and found is plan.misses.get(found.why):
            self._router._missed(found)
        return found


def _short(value: object) -> str:
    # repr of foreign objects may raise, and a huge integer's is refused by CPython.
    try:
        return repr(value)[:24]
    except Exception:
        return type(value).__name__
