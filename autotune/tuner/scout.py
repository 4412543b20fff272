"""A few rounds for the search alone: which cells are worth a proof, and of which candidate.

They time routes that nothing is proven of, so they say nothing that lasts. They are no rounds of the test,
they claim and drop nothing, and a death accuses nobody: in unguarded memory any of the routes may have caused
it. They run in a child of their own: what a wrong kernel leaves behind meets no cell that counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from autotune.bench.record import MIN_GROUP_MS, RoundSettings
from autotune.tuner.prover import seed_of
from autotune.tuner.racer import read_rounds
from autotune.tuner.trouble import explain
from autotune.worker.base import Completed, ProtocolError
from autotune.worker.jobs import TimeJob, timed

if TYPE_CHECKING:
    from autotune.bench.objective import Objective
    from autotune.bench.record import Round
    from autotune.domain.cell import Cell
    from autotune.tuner.target import Target
    from autotune.worker.base import Runs

ROUNDS = 4
# A tenth of what counts: a ratio to some percent is enough, and a cold clock slows all routes down alike.
DISCARD_ROUNDS, DISCARD_MS = 4, 20.0
# A look takes a fraction of a second; on CUDA a library may load its modules first.
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Look:
    """What a look found.

    Attributes:
        times: microseconds under the study's first objective, by route; empty if it came to nothing.
        said: why it came to nothing.
    """

    times: Mapping[str, float] = field(default_factory=dict)
    said: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, kept with the trial."""
        return {"times": dict(self.times), "said": self.said}


def look_settings(device: str) -> RoundSettings:
    """How a look's rounds are run on a kind of device."""
    return RoundSettings(
        min_group_ms=MIN_GROUP_MS[device],
        discard_rounds=DISCARD_ROUNDS,
        discard_ms=DISCARD_MS,
        max_rounds=ROUNDS,
        chunk=ROUNDS,
    )


class Scout:
    """Looks of one target.

    Args:
        worker: one that times nothing else.
        seed: of the study.
    """

    def __init__(self, worker: Runs, target: Target, seed: int) -> None:
        self._worker = worker
        self._target = target
        self._seed = seed

    def look(self, cell: Cell, routes: tuple[str, ...], objective: Objective) -> Look:
        """Time ``routes`` in ``cell``; never raises for what a route does.

        Raises:
            WorkerError: no child can be had.
        """
        rounds: list[Round] = []

        def on_event(payload: Any) -> bool:
            rounds.extend(read_rounds(payload, len(rounds)))
            return len(rounds) < ROUNDS

        target = self._target
        job = TimeJob(
            routes=routes,
            cell=cell.to_dict(),
            facts=target.facts.to_dict(),
            seed=seed_of(self._seed, cell.id, "look"),
            device=target.device,
            arena_kind="plain",
            settings=asdict(look_settings(target.facts.device)),
        )
        try:
            outcome = timed(self._worker.run(job, timeout_s=TIMEOUT_S, on_event=on_event))
        except ProtocolError as error:
            return Look(said=str(error))
        if not isinstance(outcome, Completed):
            return Look(said=explain(outcome))
        seen = {name: [objective(each, name) for each in rounds if name in each.run_us] for name in routes}
        times = {name: median(found) for name, found in seen.items() if found}
        if not times or min(times.values()) <= 0:
            return Look(said="it gave no rounds")
        return Look(times)
