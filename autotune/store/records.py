"""What the repository takes and gives back: frozen, no SQLAlchemy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from autotune.domain.cell import Cell, Column
from autotune.domain.fingerprint import Facts
from autotune.domain.identity import stable_id
from autotune.domain.verdict import CheckResult


@dataclass(frozen=True)
class Fingerprint:
    """Registered facts. Proofs, self-tests and quarantines are bound to exactly these two ids."""

    hardware_id: str
    software_id: str
    facts: Facts

    @classmethod
    def of(cls, facts: Facts) -> Fingerprint:
        """The ids of ``facts``: equal facts, equal ids, on any machine. Informative facts do not count."""
        return cls(
            stable_id({"device": facts.device, "hardware": dict(facts.hardware)}),
            stable_id({"device": facts.device, "software": dict(facts.software)}),
            facts,
        )


@dataclass(frozen=True)
class Study:
    """One search on one fingerprint; nothing in it changes after its creation.

    Attributes:
        objectives: what the rounds must resolve (``graph``, ``step``).
        margin: a route is faster when its ratio exceeds 1 + margin.
        multiplicity: N, the claims among which at most 5 % of tables may hold a false one.
        unit: ``round``, or ``block4`` where the pilot found neighbouring rounds correlated.
        resumed: whether it was in the database already.
    """

    id: str
    fingerprint: Fingerprint
    space_name: str
    space_digest: str
    engine: str
    objectives: tuple[str, ...]
    margin: float
    multiplicity: int
    unit: str
    seed: int
    code_version: str
    created_at: datetime
    resumed: bool = True

    @property
    def optuna_name(self) -> str:
        """Name of the Optuna study that goes with it."""
        return f"autotune-{self.id}"


@dataclass(frozen=True)
class StudyCell:
    """A cell of a study. ``number`` is the integer that stands for it in Optuna, ``position`` its rank in
    the queue, ``models`` who asks for it."""

    cell: Cell
    number: int
    position: int
    models: tuple[str, ...]


@dataclass(frozen=True)
class Proof:
    """One stored check. ``cell_id`` is None for the column as a whole."""

    column: Column
    cell_id: str | None
    route: str
    route_version: int
    result: CheckResult
    repro: str
    created_at: datetime


@dataclass(frozen=True)
class Recheck:
    """A cell's rounds in one later process.

    Attributes:
        process: its number among those that timed the cell again, from 1.
        sampled: it was begun for the cell's place in the sample, not for a near claim.
        rounds: as they were stored, in order, numbered from 0.
    """

    process: int
    sampled: bool
    rounds: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Timing:
    """What a cell's rounds say about one route.

    Attributes:
        rounds, above, below: n of the sign test, and how many of them lie above and below its threshold.
        run_us, host_us, prepare_us: medians in microseconds per launch; None if not measured.
        summary: whatever else the bench derives, JSON-ready.
    """

    route: str
    rounds: int
    above: int = 0
    below: int = 0
    run_us: float | None = None
    host_us: float | None = None
    prepare_us: float | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)


# A child that ends itself with words that excuse it ("out of memory") would else be given the same rounds for
# ever, and rounds that are repeated until they come out are a selection.
MOST_LOST_CHUNKS = 3


class TrialState(str, Enum):
    """Of a cell's latest trial. A parent that was killed leaves ``running`` behind."""

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class TrialRecord:
    """A cell's latest trial.

    Attributes:
        kills: how often a new attempt found the last one still ``running``: its process had died.
        retries: attempts after the first, whatever ended the one before.
        lost: chunks of rounds that a child took with it without accusing a route, in all attempts.
    """

    cell_id: str
    optuna_number: int
    optuna_id: int
    state: TrialState
    kills: int
    retries: int
    lost: int = 0

    @property
    def given_up(self) -> bool:
        """Whether the cell is not to be timed any more; what it has stays ``undecided``."""
        return self.lost >= MOST_LOST_CHUNKS


@dataclass(frozen=True)
class Selftest:
    """Outcome of the controls: ``results`` is what ``autotune selftest --json`` prints."""

    passed: bool
    results: list[dict[str, Any]]
    created_at: datetime


@dataclass(frozen=True)
class Quarantine:
    """A route set aside in a column (``cell_id`` None) or in one cell."""

    column: Column
    cell_id: str | None
    route: str
    reason: str
    created_at: datetime


@dataclass(frozen=True)
class Export:
    """A file written from a study; ``kind`` is ``table`` or ``evidence``."""

    kind: str
    path: str
    digest: str
    created_at: datetime


@dataclass(frozen=True)
class Summary:
    """Counts of a study.

    Attributes:
        cells, decided: in the study; with a decision.
        reasons: decisions by reason value.
        routes: decisions by non-fallback route.
        checks: proof rows of the study's columns by status value.
        unsafe: (column, route) pairs with a failed check.
        kills, retries: summed over the trials.
    """

    cells: int
    decided: int
    reasons: Mapping[str, int]
    routes: Mapping[str, int]
    checks: Mapping[str, int]
    unsafe: int
    kills: int
    retries: int

    @property
    def undecided(self) -> int:
        """Cells that were measured to the last round without an answer."""
        return self.reasons.get("undecided", 0)
