"""Which kernel each captured call really ran, beside what the table answered then.

``Bound.capture`` notes the router's answer. A hook may have run another kernel: a miss kept the engine's own,
the contract refused the call, a kernel could not be called here. Then the graph holds what the table never
named, and a withdrawal of that has to be seen all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.router.status import Recapture

if TYPE_CHECKING:
    from autotune.domain.dtypes import DTypes
    from autotune.domain.shape import Shape
    from autotune.engines.choice import Choice, Chooser
    from autotune.router.status import RouterStatus

# shape, dtypes, max context, batch size, q_len
_Key = tuple["Shape", "DTypes", int, int, int]


@dataclass(frozen=True, slots=True)
class Note:
    """One captured call.

    Attributes:
        ran: the kernel in the graph.
        choice: what the table and the policy said of such a call then.
    """

    ran: str
    choice: Choice
    chooser: Chooser


class Captures:
    """The notes of one process; the last one of a call counts."""

    def __init__(self) -> None:
        self._notes: dict[_Key, Note] = {}

    def add(self, chooser: Chooser, batch_size: int, q_len: int, ran: str) -> None:
        """``ran`` is being recorded into a CUDA graph. The router is told where it named that kernel too."""
        key = (*chooser.kind, batch_size, q_len)
        self._notes[key] = Note(ran, chooser.choose(batch_size, q_len), chooser)
        chooser.capture(batch_size, q_len, ran)

    def stale(self) -> tuple[Recapture, ...]:
        """Calls that would go to another kernel if they were captured now, since the table says otherwise.

        Where it says what it said, a difference is the call's own (its contract), and stays.
        """
        found = []
        for (shape, dtypes, _, batch_size, q_len), note in list(self._notes.items()):
            chooser = note.chooser.again()
            now = chooser.choose(batch_size, q_len)
            kernel = now.route or chooser.stock
            before = note.choice
            said = (before.route, before.why, before.keeps_from)
            if kernel != note.ran and (now.route, now.why, now.keeps_from) != said:
                found.append(Recapture(shape, dtypes, batch_size, q_len, None, note.ran, kernel, now.why))
        return tuple(found)

    def amend(self, status: RouterStatus) -> RouterStatus:
        """The router's status with these notes in the place of its own, where both know a call."""
        known = {(shape, dtypes, batch, q_len) for shape, dtypes, _, batch, q_len in self._notes}
        others = tuple(
            each
            for each in status.recapture
            if each.max_kv_len is not None
            or (each.shape, each.dtypes, each.batch_size, each.q_len) not in known
        )
        stale = self.stale() + others
        reason = status.reason.partition("; recapture needed: ")[0]
        if stale:
            reason += f"; recapture needed: {stale[0]}"
            reason += f" (and {len(stale) - 1} more)" if len(stale) > 1 else ""
        return status._replace(reason=reason, recapture=stale)
