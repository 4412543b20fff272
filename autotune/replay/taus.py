"""The shift between processes that a recording measured.

A study times cells of its own again, the first as soon as 24 are timed, and tau follows from these. Later
processes can be replayed only for the cells that the recorded study drew, which a replay in another order, or
of some of the cells, may time late or never. It would ask at margins that the recording never asked at, and
find that rounds are missing. So a replay has the recording's tau from its first cell on. What measuring it
took is not in the replay's seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.tuner.sample import ROUNDS

if TYPE_CHECKING:
    from autotune.replay.recording import Recording
    from autotune.tuner.judge import Judge


def recorded_taus(recording: Recording, judge: Judge) -> dict[str, float | None]:
    """By objective, for the judge's engine; None where too few cells were timed again.

    Under ``step`` only cells of the judge's own models count: those of others have no layers there.
    """
    sample = {}
    for item in recording.cells:
        whole = [
            each
            for each in recording.again.get(item.cell.id, ())
            if each.sampled and len(each.rounds) >= ROUNDS
        ]
        timing = recording.timings.get(item.cell.id)
        if whole and timing is not None:
            sample[item.cell] = (timing.rounds, whole[0].rounds)
    return {
        name: judge.tau_over(
            name, {cell: both for cell, both in sample.items() if judge.objectives.weighs(name, cell.column)}
        )
        for name in judge.objectives.names
    }
