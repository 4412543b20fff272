"""What "time" means when two routes are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autotune.bench.eprocess import Unit
from autotune.bench.noise import block_medians

if TYPE_CHECKING:
    from autotune.bench.record import Round

# ``objective(round, route)`` is a time in microseconds.
Objective = Callable[["Round", str], float]


def graph(round_: Round, route: str) -> float:
    """Time of the kernel's own run: a graph replay on CUDA, the call on the CPU."""
    return round_.run_us[route]


def step(layers: int, hidden: float = 0.0) -> Objective:
    """Time of one engine step: the preparation that the engine does not hide, and every layer's call.

    Args:
        layers: layers that share one preparation.
        hidden: share of the preparation that the engine overlaps with other work, 0 .. 1.

    Raises:
        ValueError: a value makes no sense.
    """
    if layers < 1 or not 0.0 <= hidden <= 1.0:
        raise ValueError(f"layers must be at least 1 and hidden in 0..1, not {layers} and {hidden}")

    def time(round_: Round, route: str) -> float:
        call = max(round_.host_us[route], round_.run_us[route])
        return round_.prepare_us[route] * (1.0 - hidden) + layers * call

    return time


def paired_ratios(
    rounds: Sequence[Round], baseline: str, route: str, objective: Objective = graph, unit: Unit = Unit.ROUND
) -> list[float]:
    """time(baseline) / time(route) of every round that has both, in round order, in the test's unit."""
    both = [r for r in rounds if baseline in r.run_us and route in r.run_us]
    both.sort(key=lambda r: r.index)
    ratios = [objective(r, baseline) / objective(r, route) for r in both]
    return ratios if unit is Unit.ROUND else block_medians(ratios, unit.rounds)
