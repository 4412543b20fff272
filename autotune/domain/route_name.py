"""What a route may be called: in an entry point, on the command line and in a table's legend alike."""

from __future__ import annotations

import re

# Words of the table and of an engine's miss policy.
RESERVED_WORDS = frozenset({"fallback", "stock", "any"})
# Kernels that are wrong on purpose, and routes without their GPU: neither may be chosen by anything.
PLANTED = "planted-"
EMULATED = "emulated-"
NOT_FOR_USE = (PLANTED, EMULATED)
LONGEST = 64
RULE = (
    f"lower-case letters and digits, parts joined by '-', at most {LONGEST} in all, "
    f"not beginning with {' or '.join(NOT_FOR_USE)}"
)

_FORM = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def is_route_name(name: object) -> bool:
    """Whether ``name`` may stand in a legend: a kernel's name, no word the table uses itself, no test's."""
    return (
        isinstance(name, str)
        and len(name) <= LONGEST
        and _FORM.fullmatch(name) is not None
        and name not in RESERVED_WORDS
        and not name.startswith(NOT_FOR_USE)
    )
