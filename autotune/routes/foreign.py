"""What another package's route says of itself, read once.

A property may answer differently each time it is asked. What a run decides by (may it be deployed, which
proofs count, which family the table names) must be what was examined when the route was found.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.routes.base import Capture, Family, Need

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Session

_MISSING = object()


class Misfit(ValueError):  # noqa: N818 - what the object is, not what went wrong
    """An object is no route; the message says what it lacks, in one line."""


@dataclass(frozen=True, slots=True)
class ForeignRoute:
    """A ``Route`` with fixed attributes; ``supports``, ``available`` and ``open`` are the other package's.

    Attributes:
        arithmetic: what the route says of its intermediate types, or None (``routes.arithmetic``).
        made: the object itself.
    """

    name: str
    family: Family
    capture: Capture
    needs: frozenset[Need]
    deterministic: bool
    version: int
    arithmetic: Any
    made: Any

    def supports(self, column: Column, facts: Facts) -> str | None:
        """See ``Route.supports``."""
        reason: str | None = self.made.supports(column, facts)
        return reason

    def available(self, column: Column, facts: Facts) -> str | None:
        """Whether its kernels are here: None where it does not say, as it need not."""
        if not callable(ask := getattr(self.made, "available", None)):
            return None
        reason: str | None = ask(column, facts)
        return reason

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``."""
        session: Session = self.made.open(capacity, allocate)
        return session


def examine(made: Any, name: str) -> ForeignRoute:
    """``made`` as the route called ``name``. Each attribute is read once.

    Raises:
        Misfit: it does not satisfy the protocol.
        Exception: whatever its properties raise.
    """
    found: dict[str, Any] = {}
    for attribute in ("name", "family", "capture", "needs", "deterministic", "version", "supports", "open"):
        found[attribute] = getattr(made, attribute, _MISSING)
        if found[attribute] is _MISSING:
            raise Misfit(f"it has no {attribute!r}, which a route must have")
    if type(found["name"]) is not str or found["name"] != name:
        raise Misfit(f"the route calls itself {found['name']!r}; entry point and route must agree")
    for attribute, kind in (("family", Family), ("capture", Capture), ("deterministic", bool)):
        if not isinstance(found[attribute], kind):
            raise Misfit(f"{attribute} is {found[attribute]!r}, not a {kind.__name__}")
    if type(found["version"]) is not int:
        raise Misfit(f"version is {found['version']!r}, not an integer")
    needs = found["needs"]
    if type(needs) is not frozenset or not all(isinstance(need, Need) for need in needs):
        raise Misfit(f"needs is {needs!r}, not a frozenset of Need")
    if (available := getattr(made, "available", None)) is not None:  # the one method that a route may lack
        found["available"] = available
    for method in ("supports", "open", *(["available"] if available is not None else [])):
        if not callable(found[method]):
            raise Misfit(f"{method} is not a method")
        try:
            inspect.signature(found[method]).bind(None, None)
        except TypeError:
            raise Misfit(f"{method} does not take two arguments") from None
        except ValueError:  # a builtin without a signature
            continue
    return ForeignRoute(
        name=name,
        family=found["family"],
        capture=found["capture"],
        needs=needs,
        deterministic=found["deterministic"],
        version=found["version"],
        arithmetic=getattr(made, "arithmetic", None),
        made=made,
    )
