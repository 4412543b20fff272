"""Letters of a table's rows: what the reserved ones mean, and how several letters become one.

Six letters are reserved and always mean the fallback, each with its reason. Every other letter of a
legend is one of ``A-Z a-z 0-9`` and names a route.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from autotune.domain.decision import FALLBACK_LETTERS, Reason
from autotune.domain.route_name import is_route_name

NOT_FASTER = FALLBACK_LETTERS[Reason.NOT_FASTER]
UNPROVEN = FALLBACK_LETTERS[Reason.UNPROVEN]
NO_SAFE_ROUTE = FALLBACK_LETTERS[Reason.NO_SAFE_ROUTE]
QUARANTINED = FALLBACK_LETTERS[Reason.QUARANTINED]

# Order is that of the legend in a written table.
RESERVED = {
    NOT_FASTER: "fallback",
    FALLBACK_LETTERS[Reason.CANDIDATE_UNSAFE]: "fallback: the candidate is unsafe here",
    UNPROVEN: "fallback: unproven",
    FALLBACK_LETTERS[Reason.TOO_LARGE]: "fallback: too large for this device",
    NO_SAFE_ROUTE: "fallback: no route is proven safe, the fallback included",
    QUARANTINED: "fallback: quarantined",
}

# Worst first: where letters disagree, the reader should see the gravest reason for the fallback.
_WORST_FIRST = "".join(
    FALLBACK_LETTERS[reason]
    for reason in (
        Reason.NO_SAFE_ROUTE,
        Reason.CANDIDATE_UNSAFE,
        Reason.QUARANTINED,
        Reason.UNPROVEN,
        Reason.TOO_LARGE,
        Reason.NOT_FASTER,
    )
)

ROUTE_LETTER = re.compile(r"[A-Za-z0-9]")

# A route keeps its letter from table to table, so that a diff of two tables reads as decisions.
_PREFERRED = {
    "torch-splitkv": "s",
    "torch-sdpa": "o",
    "xqa-decode": "d",
    "trtllm-gen-decode": "t",
    "trtllm-gen-decode-ragged": "r",
    "trtllm-gen-context": "g",
    "fmha-v2": "f",
    "fa2": "a",
    "fa3": "b",
    "fa2-decode": "e",
}


def agree(letters: Iterable[str]) -> str:
    """The letter for a place that all ``letters`` cover: a route only where every letter names that route.

    Otherwise the gravest fallback letter among them, and ``.`` for different routes: each is proven
    somewhere, none everywhere. No letters at all is ``?``.
    """
    seen = set(letters)
    if len(seen) == 1:
        return seen.pop()
    for letter in _WORST_FIRST:
        if letter in seen:
            return letter
    return NOT_FASTER if seen else UNPROVEN


def build_legend(routes: Iterable[str]) -> dict[str, str]:
    """Letters for ``routes``, then the reserved ones.

    Known routes have fixed letters; a third party's gets the first free one of its own letters in upper
    case, then of the alphabet.

    Raises:
        ValueError: a name that cannot be a route's, or more routes than letters.
    """
    legend: dict[str, str] = {}
    names = sorted(set(routes))
    for name in names:
        if not is_route_name(name):
            raise ValueError(f"{name!r} cannot be a route's name")
    taken = set(RESERVED) | set(_PREFERRED.values())
    for name in names:
        letter = _PREFERRED.get(name)
        if letter is None:
            own = [character for character in name.upper() if character.isalpha()]
            spare = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789abcdefghijklmnopqrstuvwxyz"
            letter = next((choice for choice in [*own, *spare] if choice not in taken), None)
            if letter is None:
                raise ValueError(f"no letter is left for route {name!r}")
            taken.add(letter)
        legend[letter] = name
    return {**dict(sorted(legend.items())), **RESERVED}
