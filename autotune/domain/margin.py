"""What a claim must pass, from the study's own margin and tau. A loader holds tables to it too."""

from __future__ import annotations

# A claim must pass so many taus, and one that passes by less needs a second process.
TAUS = 3


def margin_of(floor: float, tau: float | None) -> float:
    """The margin that a claim must pass: the study's own, or three taus if that is more."""
    return floor if tau is None else max(floor, round(TAUS * tau, 6))


def near_until(floor: float, tau: float | None) -> float:
    """A claim whose lower bound does not pass this ratio needs a second process to agree."""
    return 1.0 + margin_of(floor, tau) + (0.0 if tau is None else TAUS * tau)
