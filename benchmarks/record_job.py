"""The child's side of ``record_rounds.py``: a cell's rounds, those of the start-up included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.bench.record import Round
    from autotune.worker.base import Channel


@dataclass(frozen=True)
class RecordJob:
    """:class:`autotune.worker.jobs.TimeJob` without a judge: all rounds at once, and none thrown away.

    Attributes:
        routes: names, the fallback first.
        cell, facts: ``Cell.to_dict()``, ``Facts.to_dict()``.
        settings: fields of ``RoundSettings``.
    """

    routes: tuple[str, ...]
    cell: dict[str, Any]
    facts: dict[str, Any]
    seed: int
    device: str
    settings: dict[str, Any]

    @property
    def owners(self) -> tuple[str, ...]:
        """Whose code it runs."""
        return self.routes

    def __call__(self, channel: Channel) -> dict[str, Any]:
        """Returns: ``start_up`` and ``rounds``, lists of ``Round.to_dict()``.

        A route that is at fault raises, as does everything else that ends a timing.
        """
        from autotune.bench.record import RoundSettings
        from autotune.bench.rounds import time_cell
        from autotune.domain.cell import Cell
        from autotune.domain.fingerprint import Facts
        from autotune.worker.jobs import arena_factory, child_route

        cell = Cell.from_dict(self.cell)
        texts = [f"{name}: recording {cell}" for name in self.routes]
        enter = channel.among(texts)
        places = {name: place for place, name in enumerate(self.routes)}
        start_up: list[Round] = []
        rounds: list[Round] = []

        def go_on(chunk: list[Round]) -> bool:
            # what a study does here, a commit in the parent, is what makes its pauses
            channel.ask({"rounds": len(chunk)})
            rounds.extend(chunk)
            return True

        time_cell(
            [child_route(name) for name in self.routes],
            cell,
            Facts.from_dict(self.facts),
            seed=self.seed,
            device=self.device,
            make_arena=arena_factory("plain", self.device, 0),
            settings=RoundSettings(**self.settings),
            first_round=0,
            go_on=go_on,
            launching=lambda name: enter(places.get(name)),
            discarded=start_up.append,
        )
        return {
            "start_up": [each.to_dict() for each in start_up],
            "rounds": [each.to_dict() for each in rounds],
        }
