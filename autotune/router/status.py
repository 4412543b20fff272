"""Whether a router answers from its table, and if not, why."""

from __future__ import annotations

from typing import NamedTuple

ACTIVE = "active"
INACTIVE = "inactive"


class RouterStatus(NamedTuple):
    """``state`` is ``active`` or ``inactive``; ``reason`` is one line for a log or a health page.

    ``digest`` is set whenever the table itself is sound, even where it belongs to another machine: ranks
    compare it.
    """

    state: str
    reason: str
    path: str
    digest: str | None

    @property
    def active(self) -> bool:
        """Whether the table is in use."""
        return self.state == ACTIVE
