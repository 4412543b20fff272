"""What a study's rows say of each cell, kept while the rows stay as they are.

One call asks for most cells' answers several times: which are open, which wait for a second process, what is
stored as their decision, what goes into each engine's table. An answer costs the decoding of the cell's
rounds and a pass over them for each candidate and objective. What is kept instead is the answer alone, about
a kilobyte, and never a round.

**The key** of an answer is everything that it is computed from and that can change while a study is open:

- the number of the cell's stored rounds, and of its rounds in second processes: both are only ever appended;
- the version of its column's proof rows, which rises with every row that counts: verdicts, and why timing
  last ended before its time;
- the study's test with its margin, the objective as it is weighed, and tau under it.

All of it is read anew at every question, and an answer under another key is dropped. What else an answer
rests on stays as it is while a run is open: the engine, the routes that take the column, the device and its
memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.bench.eprocess import State
from autotune.domain.verdict import Status

if TYPE_CHECKING:
    from autotune.bench.eprocess import SignTest
    from autotune.domain.decision import Decision
    from autotune.tuner.decide import Answer
    from autotune.tuner.standing import Candidate, Evidence, Standing


@dataclass(frozen=True, slots=True)
class Basis:
    """The key of a cell's evidence, and the test that reads it.

    Attributes:
        rounds, again: stored rounds of the first process, and of all later ones.
        proofs: version of the column's proof rows.
    """

    rounds: int
    again: int
    proofs: int
    test: SignTest


@dataclass(frozen=True, slots=True)
class Asked:
    """The key of a question.

    Attributes:
        layers, hidden: how ``step`` is weighed, None for the models' own layers; both None under ``graph``,
            which they do not change.
        tau: None while it is not measured.
    """

    layers: int | None
    hidden: float | None
    tau: float | None


@dataclass(frozen=True, slots=True)
class Known:
    """One cell's answer under one objective, for one engine.

    Attributes:
        decision: as :func:`autotune.tuner.decide.decide` gives it.
        fallback, fallback_error: the fallback and its worst error, None where none is known.
        fallback_requires: what its proof assumed; None where it is not proven safe.
        fallback_known: whether the fallback's proof is complete, or none is needed.
        proven: whether, besides, no candidate's proof is missing that the answer waits for.
        contender: whether a deployable candidate's proof is missing.
        live: candidates that need more rounds.
        second: the route whose claim waits for a second process; None: no claim that matters does.
        open_test: of the deployable candidates that were timed: CONTINUE if the test of one goes on, else
            EXHAUSTED if one ended without an answer; None if each has an answer.
    """

    decision: Decision
    fallback: str
    fallback_error: float | None
    fallback_requires: tuple[str, ...] | None
    fallback_known: bool
    proven: bool
    contender: bool
    live: frozenset[str]
    second: str | None
    open_test: State | None

    @classmethod
    def of(cls, evidence: Evidence, answer: Answer) -> Known:
        """What is kept of an answer."""
        verdict = evidence.fallback_verdict
        return cls(
            answer.outcome.decision,
            evidence.fallback,
            verdict.worst_error,
            verdict.requires if verdict.status is Status.SAFE else None,
            fallback_known=fallback_known(evidence),
            proven=fallback_known(evidence) and not unproven(evidence),
            contender=any(candidate.deployable for candidate in unproven(evidence)),
            live=answer.live,
            second=answer.second,
            open_test=_open_test(answer.outcome.standings),
        )


def fallback_known(evidence: Evidence) -> bool:
    """Whether the fallback's proof is complete, or the cell does not fit into the device at all."""
    return bool(evidence.too_large) or evidence.fallback_verdict.status is not Status.UNPROVEN


def unproven(evidence: Evidence) -> list[Candidate]:
    """Candidates whose proof the answer waits for: none beside a fallback that does not hold."""
    if evidence.too_large or evidence.fallback_verdict.status is not Status.SAFE:
        return []
    return [each for each in evidence.candidates if each.verdict.status is Status.UNPROVEN]


def _open_test(standings: tuple[Standing, ...]) -> State | None:
    states = {
        standing.state
        for standing in standings
        if standing.candidate.deployable and standing.progress is not None and standing.progress.n > 0
    }
    return next((state for state in (State.CONTINUE, State.EXHAUSTED) if state in states), None)


@dataclass(slots=True)
class _Kept:
    basis: Basis
    answers: dict[str, tuple[Asked, Known]] = field(default_factory=dict)  # by objective


class Memo:
    """The latest answer of each cell under each objective, for one engine."""

    def __init__(self) -> None:
        self._cells: dict[str, _Kept] = {}

    def get(self, cell_id: str, objective: str, basis: Basis, asked: Asked) -> Known | None:
        """The kept answer, if it was computed from exactly this."""
        kept = self._cells.get(cell_id)
        if kept is None or kept.basis != basis:
            return None
        found = kept.answers.get(objective)
        return found[1] if found is not None and found[0] == asked else None

    def put(self, cell_id: str, objective: str, basis: Basis, asked: Asked, known: Known) -> None:
        """Keep an answer in place of any older one."""
        kept = self._cells.get(cell_id)
        if kept is None or kept.basis != basis:
            kept = self._cells[cell_id] = _Kept(basis)
        kept.answers[objective] = (asked, known)
