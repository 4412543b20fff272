"""Whether a router answers from its table, and if not, why."""

from __future__ import annotations

from typing import NamedTuple

from autotune.domain.dtypes import DTypes
from autotune.domain.shape import Shape

ACTIVE = "active"
INACTIVE = "inactive"


class Recapture(NamedTuple):
    """A call that was recorded into a CUDA graph, and that the table in use now answers otherwise.

    ``captured`` is the kernel in the graph, ``now`` the answer of today, ``why`` its reason (``quarantined``
    above all: then the recorded kernel was withdrawn).
    """

    shape: Shape
    dtypes: DTypes
    batch_size: int
    q_len: int
    max_kv_len: int | None
    captured: str
    now: str
    why: str

    def __str__(self) -> str:
        kv = "" if self.max_kv_len is None else f" kv {self.max_kv_len}"
        return f"batch {self.batch_size} q_len {self.q_len}{kv}: {self.captured} -> {self.now} ({self.why})"


class RouterStatus(NamedTuple):
    """``state`` is ``active`` or ``inactive``; ``reason`` is one line for a log or a health page.

    ``digest`` is set whenever the table itself is sound, even where it belongs to another machine: ranks
    compare it. ``refused`` says why the file's newest contents are not in use (the table before them is);
    ``recapture`` lists captured calls that the table in use answers otherwise. ``reason`` names both.
    """

    state: str
    reason: str
    path: str
    digest: str | None
    refused: str = ""
    recapture: tuple[Recapture, ...] = ()

    @property
    def active(self) -> bool:
        """Whether the table is in use."""
        return self.state == ACTIVE
