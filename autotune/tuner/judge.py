"""From stored rows to the answer of any cell: used while tuning, and again at every export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.bench.record import Round
from autotune.domain.verdict import Status, Verdict
from autotune.hardware.memory import too_large
from autotune.tuner.decide import Candidate, Evidence, Outcome, decide, plan_next
from autotune.tuner.lineup import Lineup, line_up
from autotune.tuner.objectives import Objectives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune.bench.eprocess import SignTest
    from autotune.domain.cell import Cell, Column
    from autotune.routes.base import Route
    from autotune.store.records import Study
    from autotune.store.repository import Repository
    from autotune.tuner.book import ProofBook
    from autotune.tuner.target import Target


class Judge:
    """Applies the decision rule of one study to its stored rows. Runs nothing."""

    def __init__(
        self,
        target: Target,
        routes: Mapping[str, Route],
        repository: Repository,
        study: Study,
        book: ProofBook,
        test: SignTest,
    ) -> None:
        self.target = target
        self.routes = routes
        self.test = test
        self.objectives = Objectives(study.objectives, target.grid.entries)
        self._repository = repository
        self._study = study
        self._book = book
        self._lineups: dict[str, Lineup] = {}

    def lineup(self, column: Column) -> Lineup:
        """The routes of a column, asked once."""
        if column.id not in self._lineups:
            target = self.target
            self._lineups[column.id] = line_up(
                column,
                self.routes,
                target.engine,
                target.arch,
                target.facts,
                # what is proven was here when it was proven; an export may run elsewhere
                probe=lambda route: not self._book.knows(route, column),
            )
        return self._lineups[column.id]

    def verdict(self, route: Route, cell: Cell) -> Verdict:
        """What the stored rows prove of ``route`` in ``cell``."""
        return self._book.verdict(route, cell.column, self.target.device, cell)

    def evidence(self, cell: Cell) -> Evidence:
        """Everything stored that the cell's answer rests on."""
        lineup = self.lineup(cell.column)
        target = self.target
        wanted = target.engine.deployable(target.arch)
        absent = [
            Candidate(name, verdict)
            for name, verdict in lineup.unsupported.items()
            if name in wanted and name not in target.engine.fallback(target.arch)
        ]
        if lineup.fallback is None:
            return self._without_fallback(lineup, absent)
        return Evidence(
            fallback=lineup.fallback.name,
            fallback_verdict=self.verdict(lineup.fallback, cell),
            candidates=[
                *(
                    Candidate(route.name, self.verdict(route, cell), route.name in lineup.deployable)
                    for route in lineup.candidates
                ),
                *absent,
            ],
            rounds=tuple(Round.from_dict(data) for data in self._repository.rounds(self._study, cell)),
            stock=lineup.stock,
            too_large=self.too_large(cell),
            trouble=self._book.trouble(lineup.runners, cell),
        )

    def _without_fallback(self, lineup: Lineup, candidates: list[Candidate]) -> Evidence:
        """The engine's first fallback and why it does not stand.

        One whose kernels are only not here says nothing about the device: unproven.
        """
        names = self.target.engine.fallback(self.target.arch)
        if absent := next((name for name in names if name in lineup.absent), None):
            reason = lineup.unsupported[absent].reason
            return Evidence(absent, Verdict(Status.UNPROVEN, reason=reason), candidates)
        verdict = lineup.unsupported.get(names[0], Verdict(Status.UNSUPPORTED, reason="not installed"))
        return Evidence(names[0], verdict, candidates)

    def too_large(self, cell: Cell) -> str:
        """Why the cell can never run on this device, or an empty string."""
        memory = self.target.memory_gib
        if memory is None or not too_large(cell, memory, workspace_bytes=self.target.engine.workspace_bytes):
            return ""
        return f"its operands do not fit into {memory} GiB"

    def outcome(
        self, cell: Cell, evidence: Evidence | None = None, *, objective: str | None = None
    ) -> Outcome:
        """The decision, and how each candidate stands.

        Args:
            objective: one of the study's; its first if None.
        """
        objectives = self.objectives.of(cell.column)
        return decide(
            evidence or self.evidence(cell),
            self.test,
            objective=objectives[objective or self.objectives.first],
        )

    def wanted(self, cell: Cell, evidence: Evidence) -> tuple[str, ...]:
        """Routes that the next round must time; () once every declared objective is resolved."""
        return plan_next(evidence, self.test, objectives=self.objectives.of(cell.column).values())

    def settled(self, cell: Cell, evidence: Evidence | None = None) -> bool:
        """Whether more work cannot change the cell's answer: every proof is complete, every test final."""
        evidence = evidence or self.evidence(cell)
        if evidence.too_large:
            return True
        if evidence.fallback_verdict.status is not Status.SAFE:
            return evidence.fallback_verdict.status is not Status.UNPROVEN
        if any(candidate.verdict.status is Status.UNPROVEN for candidate in evidence.candidates):
            return False
        return not self.wanted(cell, evidence)
