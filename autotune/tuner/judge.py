"""From stored rows to the answer of any cell: used while tuning, and again at every export."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.bench.objective import paired_ratios
from autotune.bench.shift import shift, tau_of
from autotune.domain.margin import margin_of
from autotune.domain.verdict import Status, Verdict
from autotune.hardware.memory import too_large
from autotune.tuner.cell_rounds import CellRounds
from autotune.tuner.decide import Outcome, answer, decide, plan_next, plan_second
from autotune.tuner.lineup import Lineup, line_up
from autotune.tuner.memo import Asked, Basis, Known, Memo, fallback_known, unproven
from autotune.tuner.objectives import STEP, Objectives
from autotune.tuner.recheck_book import RecheckBook
from autotune.tuner.sample import ROUNDS
from autotune.tuner.standing import MOST_DROPPED, Candidate, Evidence, Question

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune.bench.eprocess import SignTest
    from autotune.bench.record import Round
    from autotune.domain.cell import Cell, Column
    from autotune.routes.base import Route
    from autotune.store.records import Study
    from autotune.store.repository import Repository
    from autotune.tuner.book import ProofBook
    from autotune.tuner.target import Target


class Judge:
    """Applies the decision rule of one study to its stored rows. Runs nothing.

    Attributes:
        test: the study's, with its margin: the floor of the one that :meth:`test_of` gives.
    """

    def __init__(
        self,
        target: Target,
        routes: Mapping[str, Route],
        repository: Repository,
        study: Study,
        book: ProofBook,
        test: SignTest,
        rechecks: RecheckBook | None = None,
        rounds: CellRounds | None = None,
    ) -> None:
        self.target = target
        self.routes = routes
        self.test = test
        self.objectives = Objectives(study.objectives, target.grid.entries)
        self._book = book
        self._lineups: dict[str, Lineup] = {}
        self._rechecks = rechecks or RecheckBook(repository, study)
        self._rounds = rounds or CellRounds(repository, study)
        self._memo = Memo()
        self._taus: dict[str, float | None] = {}
        self._taus_of = -1  # the version of the book that they were computed from
        self._lent: Mapping[str, float | None] = {}

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
            rounds=self._rounds.of(cell),
            stock=lineup.stock,
            too_large=self.too_large(cell),
            trouble=self._book.trouble(lineup.runners, cell),
            again=self._rechecks.rounds(cell),
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

    def known(self, cell: Cell, objective: str | None = None) -> Known:
        """The decision and what else is kept of a cell's answer, computed again only where a row or a
        question has changed: see :mod:`autotune.tuner.memo`.

        Args:
            objective: one of the study's; its first if None.
        """
        name = objective or self.objectives.first
        found = self._memo.get(cell.id, name, self._basis(cell), self._asked(name))
        return found or self._learn(cell)[name]

    def _learn(self, cell: Cell) -> dict[str, Known]:
        """The answers under all objectives, now that the rounds are at hand; kept under what was read."""
        evidence = self.evidence(cell)
        basis = self._basis(cell)  # reading counts the rounds that another process has added
        answers = {}
        for name, objective in self.objectives.of(cell.column).items():
            asked = self._asked(name)
            known = self._memo.get(cell.id, name, basis, asked)
            if known is None:
                known = Known.of(evidence, answer(evidence, self.test, Question(objective, asked.tau)))
                self._memo.put(cell.id, name, basis, asked, known)
            answers[name] = known
        return answers

    def _basis(self, cell: Cell) -> Basis:
        return Basis(
            self._rounds.count(cell), self._rechecks.count(cell), self._book.version(cell.column), self.test
        )

    def _asked(self, objective: str) -> Asked:
        tau = self.tau(objective)
        if objective != STEP:
            return Asked(None, None, tau)
        return Asked(self.objectives.chosen_layers, self.objectives.hidden, tau)

    def outcome(
        self, cell: Cell, evidence: Evidence | None = None, *, objective: str | None = None
    ) -> Outcome:
        """The decision, and how each candidate stands; computed anew: see :meth:`known`.

        Args:
            objective: one of the study's; its first if None.
        """
        name = objective or self.objectives.first
        return decide(
            evidence or self.evidence(cell),
            self.test,
            objective=self.objectives.of(cell.column)[name],
            tau=self.tau(name),
        )

    def wanted(self, cell: Cell, evidence: Evidence) -> tuple[str, ...]:
        """Routes that the next round must time; () once every declared objective is resolved."""
        return plan_next(evidence, self.test, questions=self._questions(cell.column))

    def second(self, cell: Cell, evidence: Evidence) -> tuple[str, ...]:
        """Routes that a second process must time; () where no objective's answer waits for one."""
        return plan_second(evidence, self.test, questions=self._questions(cell.column))

    def answers(self, cell: Cell) -> dict[str, Known]:
        """:meth:`known` under every declared objective, in order."""
        return {name: self.known(cell, name) for name in self.objectives.names}

    def _questions(self, column: Column) -> list[Question]:
        found = self.objectives.of(column).items()
        return [Question(objective, self.tau(name)) for name, objective in found]

    def tau(self, objective: str | None = None) -> float | None:
        """The shift between processes under an objective, the first if None, from the stored rounds.

        None while it is not measured. Cells without a fallback of this engine's, candidates that it cannot
        deploy (no claim rests on them), and those that lost more than a fifth of their rounds to a slow
        device, say nothing.
        """
        if self._taus_of != self._rechecks.version:
            self._taus, self._taus_of = {}, self._rechecks.version
        name = objective or self.objectives.first
        if name in self._lent:
            return self._lent[name]
        if name not in self._taus:
            sample = self._rechecks.sample().items()
            self._taus[name] = self.tau_over(
                name, {cell: (self._rounds.of(cell), second) for cell, second in sample}
            )
        return self._taus[name]

    def lend(self, taus: Mapping[str, float | None]) -> None:
        """Let tau be this, by objective, whatever the stored rounds say: a replay's is the recording's."""
        self._lent = dict(taus)

    @property
    def measured(self) -> bool:
        """Whether tau is known under any objective."""
        return any(self.tau(name) is not None for name in self.objectives.names)

    def weigh(self, layers: int | None, hidden: float) -> None:
        """Let ``step`` count these layers and this share as hidden, in answers and in its tau.

        Raises:
            ValueError: see :meth:`autotune.tuner.objectives.Objectives.weighed`.
        """
        self.objectives = self.objectives.weighed(layers, hidden)
        self._taus_of = -1

    def raced(self, cell: Cell) -> None:
        """Told that rounds were added to a cell: tau may rest on them. All judges of a run share its book."""
        self._rechecks.raced(cell)

    def test_of(self, objective: str | None = None) -> SignTest:
        """The study's test with the margin that tau allows."""
        return replace(self.test, margin=margin_of(self.test.margin, self.tau(objective)))

    def tau_over(
        self, objective: str, sample: Mapping[Cell, tuple[Sequence[Round], Sequence[Round]]]
    ) -> float | None:
        """Tau of the cells of a sample, each with the rounds of its first process and of a later one."""
        found: dict[str, list[float]] = {}
        for cell, (first, second) in sample.items():
            lineup = self.lineup(cell.column)
            if lineup.fallback is None:
                continue
            fallback, asked = lineup.fallback.name, self.objectives.one(objective, cell.column)
            timed = {name for each in second for name in each.order} - {fallback}
            for name in sorted(timed & set(lineup.deployable)):
                before = paired_ratios(first, fallback, name, asked)
                after = paired_ratios(second, fallback, name, asked)
                if before and len(after) >= (1 - MOST_DROPPED) * ROUNDS:
                    found.setdefault(cell.id, []).append(shift(before, after))
        return tau_of(found)

    def settled(self, cell: Cell, evidence: Evidence | None = None) -> bool:
        """Whether more work in the cell's first process cannot change its answer: every proof is complete,
        every test final. A claim may still wait for a second process: see :meth:`second`."""
        if evidence is not None:
            complete = fallback_known(evidence) and not unproven(evidence)
            return complete and not self.wanted(cell, evidence)
        return all(known.proven and not known.live for known in self.answers(cell).values())
