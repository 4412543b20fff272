"""The adaptive search: what a budget is best spent on, from what has been timed and proven so far.

Each time it takes the cell with the most

    traffic weight x E[positive gain] / predicted seconds

What a gain is, and how it is forecast, is in :mod:`autotune.tuner.hopes`. The seconds are those that are
missing: the proof of the fallback and of the likely winner, shared by the cells of the column that are worth
taking along, and the timing. Where a proof may well be in vain, a few search rounds come first
(:mod:`autotune.tuner.scout`).

Only the likely winner is proven beside the fallback. The cell is settled once it claims; a candidate that
was not proven stays unproven there, and an exhaustive run later proves it. Where the winner fails, the next
best is tried, unless something else promises more. Claims are tested as ever, with the N of all cells.

Nothing is kept but the study's rows: rounds, proofs, looks (user attributes of Optuna's trials) and the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.tuner.cost import best_shares, predict, predict_look
from autotune.tuner.hopes import Hope, Hopes
from autotune.tuner.pace import KEPT, PROOF, SEARCH, TIMING, Pace
from autotune.tuner.scout import Look, look_settings
from autotune.tuner.strategy import Pick, Wanted, anything

if TYPE_CHECKING:
    from autotune.domain.cell import Cell, Column
    from autotune.domain.decision import Decision
    from autotune.store.records import StudyCell
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.run import OpenedRun


@dataclass(frozen=True, slots=True)
class Choice:
    """The best that can be done in one column now.

    Attributes:
        score: weighted gain a second.
        taken: the cells that share the proof, the one to take first.
        winners: routes to prove beside the fallbacks.
        seconds: predicted, for the first cell and what it needs.
        proof_s: of them, the proof.
        look: routes to look at instead, () to settle.
    """

    score: float
    taken: tuple[StudyCell, ...]
    winners: frozenset[str]
    seconds: float
    proof_s: float
    look: tuple[str, ...] = ()

    @property
    def item(self) -> StudyCell:
        """The cell to take."""
        return self.taken[0]


@dataclass
class _State:
    """One call's work."""

    pending: dict[int, StudyCell] = field(default_factory=dict)
    out: dict[int, Choice] = field(default_factory=dict)  # with a taker
    again: frozenset[str] = frozenset()
    tried: set[tuple[int, str]] = field(default_factory=set)  # (cell, route): settled with it, and open
    left: int | None = None  # picks that may still be settled


class Adaptive:
    """See the module.

    Args:
        weights: of cells by id, as a traffic file gives them; None: 1 each.
        pace: corrects the predicted seconds.
        provers: children that prove at once: the next columns' proofs are run together, two a child.
    """

    def __init__(
        self,
        run: OpenedRun,
        deadline: Deadline,
        pace: Pace,
        provers: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._run = run
        self._deadline = deadline
        self.pace = pace
        self._provers = provers
        self._weights = weights
        self._device = run.target.facts.device
        self.hopes = Hopes(run)
        self._items = {item.number: item for item in run.cells}
        self._seconds: dict[tuple[int, int], float] = {}  # of timing, by cell number and routes
        self._factors: dict[str, float] = {}
        self._state = _State()
        self._chosen = -1
        self._together: dict[int, tuple[Column, ...]] = {}  # columns that a pick's proof touched

    def settled(self, cell: Cell) -> bool:
        """Whether the answer is final: every proven route's test is, and a route claims, or there is no
        candidate left that could.

        A deployable candidate may be unproven in a cell that another one has won.
        """
        for judge in self._run.judges:
            answers = judge.answers(cell)
            first = answers[judge.objectives.first]
            if not first.fallback_known or any(known.live for known in answers.values()):
                return False
            if first.contender and first.decision.route is None:
                return False
        return True

    def start(self, pending: Sequence[StudyCell], again: frozenset[str], trials: int | None) -> None:
        """See :class:`autotune.tuner.strategy.Strategy`. Reads what the study's rows say."""
        self._state = _State({item.number: item for item in pending}, again=again, left=trials)
        self._run.queue.sample_with(lambda: self._chosen)
        self.hopes.start({number: look["times"] for number, look in self._run.queue.looks().items()})
        for column in {item.cell.column for item in pending}:
            self.hopes.stand(column)

    def take(self, free: Callable[[Column], bool] = anything) -> Pick | None:
        """See :class:`autotune.tuner.strategy.Strategy`."""
        state = self._state
        if state.left == 0:
            return None
        choices = self.choices(free)
        if not choices:
            return None
        left = self._deadline.left
        choice = next((each for each in choices if each.seconds <= left), choices[0])
        number, again = choice.item.number, choice.item.cell.id in state.again
        state.out[number] = choice
        self._chosen = number
        if not again:
            self._run.queue.ask(self._items, look=bool(choice.look))
        if choice.look:
            return Pick(choice.item, look=choice.look)
        if state.left is not None:
            state.left -= 1
        prove = self._proofs(choice, choices, left)
        self._together[number] = tuple({each.item.cell.column for each in prove})
        return Pick(choice.item, again, prove)

    def told(self, item: StudyCell, decision: Decision | None) -> None:
        """See :class:`autotune.tuner.strategy.Strategy`."""
        state = self._state
        choice = self._done(item)
        if not choice.look:
            state.tried |= {(item.number, name) for name in choice.winners}
            if decision is not None or not self.hope(item).winners:
                state.pending.pop(item.number, None)
        self._run.queue.note(KEPT, self.pace.to_dict())

    def give_back(self, pick: Pick, decision: Decision | None) -> None:
        """See :class:`autotune.tuner.strategy.Strategy`."""
        state = self._state
        choice = self._done(pick.item)
        if decision is not None:
            state.pending.pop(pick.item.number, None)
        elif state.left is not None and not choice.look:
            state.left += 1

    def _done(self, item: StudyCell) -> Choice:
        """A pick is out no more: read what it left behind."""
        for column in self._together.pop(item.number, ()):
            self.hopes.stand(column)
        self.hopes.read(item)
        return self._state.out.pop(item.number)

    def looked(self, item: StudyCell, look: Look) -> None:
        """See :class:`autotune.tuner.strategy.Strategy`."""
        self.hopes.looks[item.number] = dict(look.times)

    def choices(self, free: Callable[[Column], bool] = anything) -> list[Choice]:
        """What could be done now, the best first; cheapest first among equals."""
        state = self._state
        self._factors = {name: self.pace.factor(name) for name in (PROOF, TIMING, SEARCH)}
        busy = {self._items[number].cell.column.id for number in state.out}
        busy.update(column.id for columns in self._together.values() for column in columns)
        waiting: dict[str, list[StudyCell]] = {}  # by column id, which is not hashed anew
        for item in state.pending.values():
            if item.cell.column.id not in busy:
                waiting.setdefault(item.cell.column.id, []).append(item)
        open_ones = [items for items in waiting.values() if free(items[0].cell.column)]
        hopes = self.hopes.of([item for items in open_ones for item in items], state.tried)
        found = [self._choice(items[0].cell.column, items, hopes) for items in open_ones]
        return sorted(found, key=lambda each: (-each.score, each.item.position))

    def hope(self, item: StudyCell) -> Hope:
        """What one cell promises now."""
        return self.hopes.of([item], self._state.tried)[item.number]

    def _choice(self, column: Column, items: Sequence[StudyCell], hopes: Mapping[int, Hope]) -> Choice:
        timing = {item.number: self._timing_s(item, hopes[item.number]) for item in items}
        gains = {item.number: self._weight(item) * hopes[item.number].gain for item in items}
        order = sorted(items, key=lambda i: (-gains[i.number] / timing[i.number], i.position))
        first = hopes[order[0].number]
        proof_s = self._proof_s(column, first.winners)
        score, count = best_shares([(gains[i.number], timing[i.number]) for i in order], proof_s)
        taken = tuple(i for i in order[:count] if hopes[i.number].winners == first.winners)
        seconds = proof_s + timing[order[0].number]
        look = self._worth_a_look(order[0], first, proof_s)
        return Choice(score, taken, first.winners, seconds, proof_s, look)

    def _worth_a_look(self, item: StudyCell, hope: Hope, proof_s: float) -> tuple[str, ...]:
        """Routes to look at first, where the proofs that this may save cost more than the look."""
        unseen = (
            item.number not in self.hopes.looks and not hope.timed and item.cell.id not in self._state.again
        )
        if not unseen or not hope.winners or proof_s == 0.0:
            return ()
        standing = self.hopes.standing(item.cell.column)
        routes = tuple(dict.fromkeys((*(f for f, _ in standing.pairs), *hope.winners, *hope.rivals)))
        one = standing.proof_s * self._factors[PROOF]
        saved = hope.in_vain * proof_s + hope.misled * one
        cost = predict_look(item.cell, self._device, look_settings(self._device), len(routes))
        return routes if saved > cost * self._factors[SEARCH] else ()

    def _proofs(self, choice: Choice, choices: Sequence[Choice], left: float) -> tuple[Wanted, ...]:
        """The choice's proof; several children run those of the next columns with it.

        What is begun ahead may use half of the time that is left.
        """
        together = [choice]
        ahead = choice.proof_s
        if choice.proof_s > 0.0 and self._provers > 1:
            for each in choices:
                if len(together) == 2 * self._provers or ahead + each.proof_s > left / 2:
                    break
                if each is not choice and not each.look and each.proof_s > 0.0 and each.score > 0.0:
                    together.append(each)
                    ahead += each.proof_s
        return tuple(Wanted(item, each.winners) for each in together for item in each.taken)

    def _timing_s(self, item: StudyCell, hope: Hope) -> float:
        routes = 1 + max(1, len(hope.winners))
        if (seconds := self._seconds.get((item.number, routes))) is None:
            seconds = self._seconds[item.number, routes] = predict(item.cell, self._device, routes)
        return seconds * self._factors[TIMING]

    def _proof_s(self, column: Column, winners: frozenset[str]) -> float:
        standing = self.hopes.standing(column)
        routes = {fallback for fallback, _ in standing.pairs} | winners
        owed = sum(standing.owed.get(name, 0.0) for name in routes)
        return owed * standing.proof_s * self._factors[PROOF]

    def _weight(self, item: StudyCell) -> float:
        return 1.0 if self._weights is None else self._weights.get(item.cell.id, 0.0)
