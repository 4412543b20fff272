"""Which routes stand for a column: the fallback, the stock route, the candidates, and why others do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from autotune.domain.verdict import Status, Verdict
from autotune.routes.registry import is_built_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Route
    from autotune.space.engine import Engine


@runtime_checkable
class Probing(Protocol):
    """A route that can say whether its kernels are here: an optional part of a route.

    ``supports`` answers from facts, on any machine; this looks at the installation.
    """

    def available(self, column: Column, facts: Facts) -> str | None:
        """None if the route's kernels for ``column`` can be loaded here, else why not, in one line.

        Called in the parent: it must import no kernel library.
        """


@dataclass(frozen=True)
class Lineup:
    """The routes of one column under one engine.

    Attributes:
        fallback: the first of the engine's list that supports the column; None if none does.
        stock: what the engine calls by itself, if it supports the column.
        runners: every supported route, the fallback first: proven and timed.
        deployable: runners that the engine can call; the others are measured and shown as advice.
        unsupported: a verdict for each route that is no runner.
        absent: those of them that support the column and whose kernels are not here.
    """

    fallback: Route | None
    stock: str | None
    runners: tuple[Route, ...]
    deployable: frozenset[str]
    unsupported: Mapping[str, Verdict] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()

    @property
    def candidates(self) -> tuple[Route, ...]:
        """Runners other than the fallback."""
        return tuple(route for route in self.runners if route is not self.fallback)


def left_out(lineups: Iterable[Lineup]) -> dict[str, str]:
    """Routes whose kernels are not here, each with where and why: what a run is told before it begins, since
    its table would have another fallback, or a candidate less, than the same space elsewhere."""
    asked = list(lineups)
    found: dict[str, list[str]] = {}
    for lineup in asked:
        for name in lineup.absent:
            found.setdefault(name, []).append(lineup.unsupported[name].reason)
    return {
        name: f"{name} is left out in {len(reasons)} of {len(asked)} columns: {reasons[0]}"
        for name, reasons in sorted(found.items())
    }


def _nobody(route: Route) -> bool:
    return False


def line_up(
    column: Column,
    routes: Mapping[str, Route],
    engine: Engine,
    arch: str,
    facts: Facts,
    *,
    probe: Callable[[Route], bool] = _nobody,
) -> Lineup:
    """Ask every route whether it takes ``column``.

    A third party's ``supports`` that raises makes its route unsupported: it cannot stop a run.

    Args:
        probe: which routes are also asked whether their kernels are here, if they can say so
            (:class:`Probing`). Not one that has been proven: its rows count wherever they are read.
    """
    supported: dict[str, Route] = {}
    unsupported: dict[str, Verdict] = {}
    absent = set()
    for name, route in routes.items():
        try:
            reason = route.supports(column, facts)
            if reason is None and isinstance(route, Probing) and probe(route):
                reason = route.available(column, facts)
                if reason is not None:
                    absent.add(name)
        except Exception as error:
            reason = f"asked for {column}, it raised {type(error).__name__}: {error}"
        if reason is None:
            supported[name] = route
        else:
            unsupported[name] = Verdict(Status.UNSUPPORTED, reason=reason)
    fallback = next((supported[name] for name in engine.fallback(arch) if name in supported), None)
    stock = engine.stock(arch)
    can_deploy = frozenset(
        name
        for name, route in supported.items()
        if engine.can_deploy(arch, name, built_in=is_built_in(name))
        and all(need.value in engine.offers for need in route.needs)
    )
    others = [route for route in supported.values() if route is not fallback]
    return Lineup(
        fallback=fallback,
        stock=stock if stock in supported else None,
        runners=(fallback, *others) if fallback is not None else (),
        deployable=can_deploy,
        unsupported=unsupported,
        absent=frozenset(absent),
    )
