"""How long each stored answer took, from the moments at which it and its neighbours were stored.

A database keeps when a row was committed, not when its work began. The rule:

- A **check** began when the row before it of the same route and column was stored: one child runs the checks
  of a route and column one after the other. Where there is none within :data:`STRETCH_S` (the first check of
  all, or a later call went on), it is given its launches times the seconds per launch of the others.
- Children prove at once. A moment in which k of them were proving counts 1/k for each: the sum over all
  checks is the time in which the device was used for proofs, whatever the number of children was.
- A **chunk of rounds** began when whatever is stored before it was: the chunk before it, a proof, or the
  start of a trial. Its seconds so include sessions that were opened and rounds that were thrown away. Where
  that is longer ago than :data:`STRETCH_S`, it is given its cell's median, or the cost model's prediction.

On one device all seconds together are the time between a call's first row and its last one; where several
devices worked at once, they are what all of them did in a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

# A check or a chunk takes seconds. What lies further back was another call, or a pause.
STRETCH_S = 60.0
# Of a launch where nothing else of its route and column was recorded: an H200's median over all checks.
LAUNCH_S = 0.03


def check_seconds(rows: Sequence[tuple[Hashable, float, int]]) -> list[float]:
    """Device seconds of each check.

    Args:
        rows: (route and column, moment at which it was stored in seconds, launches), in any order.
    """
    began = _began(rows)
    spans = [(start, rows[i][1]) for i, start in enumerate(began)]
    # between two neighbouring moments the number of checks that run does not change
    moments = sorted({moment for span in spans for moment in span})
    places = {moment: i for i, moment in enumerate(moments)}
    change = [0] * len(moments)
    for start, end in spans:
        change[places[start]] += 1
        change[places[end]] -= 1
    share, running = [0.0], 0  # share[i]: what a check that ran all the time has gathered up to moments[i]
    for (here, there), delta in zip(pairwise(moments), change, strict=False):
        running += delta
        share.append(share[-1] + ((there - here) / running if running else 0.0))
    return [share[places[end]] - share[places[start]] for start, end in spans]


def _began(rows: Sequence[tuple[Hashable, float, int]]) -> list[float]:
    """When each check began."""
    groups: dict[Hashable, list[int]] = {}
    for i, (key, _, _) in enumerate(rows):
        groups.setdefault(key, []).append(i)
    began = [0.0] * len(rows)
    for indices in groups.values():
        indices.sort(key=lambda i: rows[i][1])
        known = [
            (later, rows[later][1] - rows[earlier][1])
            for earlier, later in pairwise(indices)
            if rows[later][1] - rows[earlier][1] <= STRETCH_S
        ]
        launches = sum(rows[i][2] for i, _ in known)
        per_launch = sum(seconds for _, seconds in known) / launches if launches else LAUNCH_S
        took = dict(known)
        for i in indices:
            began[i] = rows[i][1] - took.get(i, rows[i][2] * per_launch)
    return began


def chunk_seconds(
    chunks: Mapping[str, Sequence[float]], others: Iterable[float], predicted: Mapping[str, float]
) -> dict[str, list[float]]:
    """Seconds of each chunk of each cell.

    Args:
        chunks: by cell, the moments at which its chunks were stored, in order.
        others: moments at which proofs were stored or trials began.
        predicted: by cell, the cost model's seconds for all of its timing.
    """
    events = sorted([*others, *(moment for moments in chunks.values() for moment in moments)])
    found = {}
    for cell, moments in chunks.items():
        seconds: list[float | None] = []
        for moment in moments:
            at = bisect_left(events, moment)
            took = moment - events[at - 1] if at else STRETCH_S + 1
            seconds.append(took if took <= STRETCH_S else None)
        usual = [each for each in seconds if each is not None]
        missing = median(usual) if usual else predicted[cell] / len(moments)
        found[cell] = [missing if each is None else each for each in seconds]
    return found
