"""Predicted against measured seconds, phase by phase: how far off the cost model is on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROOF, TIMING, SEARCH = "proof", "timing", "search"
# Under which name it is kept beside the study.
KEPT = "pace"
# A factor starts at 1 and moves once this many seconds were predicted: the first cell's imports are no pace.
INERTIA_S = 10.0


@dataclass(slots=True)
class Phase:
    """Seconds of one phase: what the cost model said, and what it took."""

    predicted_s: float = 0.0
    actual_s: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """JSON-ready values."""
        return {"predicted_s": round(self.predicted_s, 3), "actual_s": round(self.actual_s, 3)}


@dataclass
class Pace:
    """Phases of one call, and those of the study's earlier calls.

    Attributes:
        call: this call's, by name: ``proof``, ``timing``, and ``search`` where the search looked at cells.
        before: the earlier calls' that were kept.
    """

    call: dict[str, Phase] = field(default_factory=dict)
    before: Mapping[str, Phase] = field(default_factory=dict)

    def add(self, name: str, predicted_s: float, actual_s: float) -> None:
        """Count a piece of work."""
        phase = self.call.setdefault(name, Phase())
        phase.predicted_s += predicted_s
        phase.actual_s += actual_s

    def factor(self, name: str) -> float:
        """By what predictions of a phase are to be multiplied."""
        both = [phases[name] for phases in (self.call, self.before) if name in phases]
        predicted = INERTIA_S + sum(phase.predicted_s for phase in both)
        return (INERTIA_S + sum(phase.actual_s for phase in both)) / predicted

    def to_dict(self) -> dict[str, dict[str, float]]:
        """All calls together, JSON-ready: what :meth:`resumed` takes."""
        total: dict[str, Phase] = {}
        for phases in (self.before, self.call):
            for name, phase in phases.items():
                mine = total.setdefault(name, Phase())
                mine.predicted_s += phase.predicted_s
                mine.actual_s += phase.actual_s
        return {name: phase.to_dict() for name, phase in total.items()}

    @classmethod
    def resumed(cls, kept: Any) -> Pace:
        """A new call's, after what earlier ones kept; None: nothing was."""
        return cls(before={name: Phase(**phase) for name, phase in (kept or {}).items()})
