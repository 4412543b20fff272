"""The recorded routes, which are never opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from autotune.replay.errors import RecordingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.replay.recording import Recording
    from autotune.routes.base import Capture, Family, Need, Route


@dataclass(frozen=True)
class RecordedRoute:
    """A registered route that is not asked whether its kernels are on this machine."""

    name: str
    family: Family
    capture: Capture
    needs: frozenset[Need]
    deterministic: bool
    version: int
    _route: Route

    def supports(self, column: Column, facts: Facts) -> str | None:
        """The registered route's answer for the recorded machine."""
        return self._route.supports(column, facts)


def recorded_routes(
    recording: Recording, registered: Mapping[str, Route], only: Iterable[str] | None = None
) -> dict[str, Route]:
    """The routes that take part, in the registry's order.

    Args:
        only: some of the recorded ones; None: all.

    Raises:
        RecordingError: one was not recorded, or is not registered here.
    """
    names = set(recording.routes)
    if only is not None:
        asked = set(only)
        if unknown := sorted(asked - names):
            raise RecordingError(
                f"{recording.where}: route {unknown[0]} was not recorded; there are "
                f"{', '.join(recording.routes)}"
            )
        names = asked
    if missing := sorted(names - set(registered)):
        raise RecordingError(
            f"{recording.where}: was recorded with the route {missing[0]}, which is not installed here; "
            "install the package that adds it, or name the others with --routes"
        )
    return {
        name: cast(
            "Route",
            RecordedRoute(
                name, route.family, route.capture, route.needs, route.deterministic, route.version, route
            ),
        )
        for name, route in registered.items()
        if name in names
    }
