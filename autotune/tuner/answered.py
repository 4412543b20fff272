"""The cells that a table answers, and a sample of them drawn evenly over its letters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.domain.cell import Cell, Column
from autotune.domain.decision import FALLBACK_LETTERS, Reason
from autotune.space.grid import interior
from autotune.table.errors import TableError
from autotune.table.letters import QUARANTINED, RESERVED, UNPROVEN

if TYPE_CHECKING:
    from autotune.table.model import Entry, Grid, Ratio, RoutingTable, Speedup

# Letters behind which there is no evidence to repeat: never measured, not measurable here, a person's word.
_NO_EVIDENCE = frozenset({UNPROVEN, QUARANTINED, FALLBACK_LETTERS[Reason.TOO_LARGE]})


@dataclass(frozen=True, slots=True)
class Answered:
    """One letter of a table, and the cell that was measured for it.

    Attributes:
        letter: as the table has it; ``answer`` is what it names: a route, or the reserved letter itself.
        speedup_low, vs_stock: the table's ratios at this place.
        beside: answers of the captured sizes of an eager interval in this row, which share its letter; ()
            for a captured size. The cell is then the batch that was sampled inside the interval.
        checks: the table's, behind the route that is named; None where none is.
    """

    entry: Entry
    cell: Cell
    letter: str
    answer: str
    speedup_low: Ratio = None
    vs_stock: Ratio = None
    beside: tuple[str, ...] = ()
    checks: int | None = None

    @property
    def route(self) -> str | None:
        """The route that the letter names; None for the fallback."""
        return None if self.answer in RESERVED else self.answer


def answered(table: RoutingTable) -> tuple[Answered, ...]:
    """Every cell that the table answers from evidence, in its order.

    Left out are the ``any`` rows and intervals without a batch inside, which follow from the others, and the
    letters ``?``, ``x`` and ``q``.

    Raises:
        TableError: a place that no cell can stand for.
    """
    found: list[Answered] = []
    for index, entry in enumerate(table.entries):
        try:
            found += _of_entry(entry, table)
        except ValueError as error:
            raise TableError(f"entries[{index}]", str(error)) from error
    return tuple(place for place in found if place.letter not in _NO_EVIDENCE)


def draw(places: Sequence[Answered], count: int, seed: int) -> tuple[Answered, ...]:
    """``count`` of ``places``, as many of each letter as of any other, as far as they go; in table order.

    A rare letter is looked at as closely as a frequent one: what could break is seldom what is frequent.

    Args:
        count: at least one of each letter is drawn, whatever this says.
        seed: equal seeds draw equal samples from equal tables.
    """
    chance = random.Random(seed)
    letters = sorted({place.letter for place in places})
    piles = []
    for letter in letters:
        pile = [number for number, place in enumerate(places) if place.letter == letter]
        piles.append(chance.sample(pile, len(pile)))
    chance.shuffle(piles)
    drawn: list[int] = []
    wanted = min(len(places), max(count, len(letters)))
    while len(drawn) < wanted:
        for pile in piles:
            if pile and len(drawn) < wanted:
                drawn.append(pile.pop())
    return tuple(places[number] for number in sorted(drawn))


def _of_entry(entry: Entry, table: RoutingTable) -> Iterator[Answered]:
    checks = {proof.route: proof.checks for proof in entry.proof}
    answers = {letter: letter if letter in RESERVED else name for letter, name in table.legend.items()}
    pad = table.policy.pad_value

    def read(
        grid: Grid, speedup: Speedup, columns: Sequence[Column | None], beside: Sequence[range]
    ) -> Iterator[Answered]:
        low = entry.q_len
        for number, row in enumerate(grid.rows):
            for place, column in enumerate(columns):
                if column is None:
                    continue
                answer = answers[row.letters[place]]
                yield Answered(
                    entry,
                    Cell(column, low, row.kv_high),
                    row.letters[place],
                    answer,
                    speedup.low[number][place],
                    speedup.vs_stock[number][place],
                    tuple(answers[entry.routes.rows[number].letters[at]] for at in beside[place]),
                    checks.get(answer),
                )
            low = row.kv_high + 1

    captured = [
        Column(entry.shape, entry.dtypes, entry.q_len, size, entry.max_context, None, pad)
        for size in entry.batch_size
    ]
    yield from read(entry.routes, entry.speedup, captured, [range(0)] * len(captured))
    if (eager := entry.eager) is not None:
        inside = [
            None
            if (size := interior(*span)) is None
            else Column(entry.shape, entry.dtypes, entry.q_len, size, entry.max_context, span, pad)
            for span in eager.intervals
        ]
        at = {size: position for position, size in enumerate(entry.batch_size)}
        ends = [range(at[low], at[high] + 1) for low, high in eager.intervals]
        yield from read(eager.routes, eager.speedup, inside, ends)
