"""What a table says about one cell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(str, Enum):
    """Why a cell's answer is what it is."""

    PROVEN_FASTER = "proven_faster"
    NOT_FASTER = "not_faster"
    UNDECIDED = "undecided"
    CANDIDATE_UNSAFE = "candidate_unsafe"
    UNSUPPORTED = "unsupported"
    UNPROVEN = "unproven"
    TOO_LARGE = "too_large"
    NO_SAFE_ROUTE = "no_safe_route"
    QUARANTINED = "quarantined"


# Letters that mean the fallback; every other letter of a table's legend names a route.
FALLBACK_LETTERS = {
    Reason.NOT_FASTER: ".",
    Reason.UNDECIDED: ".",
    Reason.UNSUPPORTED: ".",
    Reason.CANDIDATE_UNSAFE: "!",
    Reason.UNPROVEN: "?",
    Reason.TOO_LARGE: "x",
    Reason.NO_SAFE_ROUTE: "#",
    Reason.QUARANTINED: "q",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for one cell.

    ``route`` is None where the answer is the fallback. ``speedup_low`` is the proven lower bound of
    time(fallback) / time(route) under the study's error rate, ``speedup`` its median; ``vs_stock`` the
    median of time(stock) / time(route).

    Raises:
        ValueError: a route without the reason ``proven_faster``, or the other way round.
    """

    route: str | None
    reason: Reason
    detail: str = ""
    speedup_low: float | None = None
    speedup: float | None = None
    vs_stock: float | None = None

    def __post_init__(self) -> None:
        if (self.route is not None) != (self.reason is Reason.PROVEN_FASTER):
            raise ValueError(f"route {self.route!r} contradicts reason {self.reason.value}")
