"""A study's own database as a recording: rows as they were stored, times from when they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import select

from autotune.bench.record import Round
from autotune.replay.errors import RecordingError
from autotune.replay.packing import pack
from autotune.replay.recording import RecordedAgain, RecordedCheck, RecordedTiming, Recording
from autotune.replay.seconds import check_seconds, chunk_seconds
from autotune.store.database import open_database
from autotune.store.models import RecheckRow, RoundChunkRow, TrialRow
from autotune.store.repository import Repository
from autotune.tuner.cost import predict

if TYPE_CHECKING:
    from autotune.store.database import Database
    from autotune.store.records import Study, StudyCell

# Of a recorded time; a commit takes longer.
DIGITS = 4

Choose = Callable[[list[tuple["Study", frozenset[str]]]], "Study"]


def read_study(path: Path, where: str, choose: Choose) -> Recording:
    """The study that ``choose`` takes, of (study, ids of its cells); ``path`` is a copy that may be changed.

    Raises:
        StoreError: not a database of ours.
        RecordingError: from ``choose``; or a row that cannot be read.
    """
    with open_database(f"sqlite:///{path}") as database:
        repository = Repository(database)
        cells = {study.id: repository.cells(study) for study in repository.studies()}
        offers = [
            (study, frozenset(item.cell.id for item in cells[study.id])) for study in repository.studies()
        ]
        study = choose(offers)
        return _read(database, repository, where, study, cells[study.id])


def _read(
    database: Database, repository: Repository, where: str, study: Study, cells: list[StudyCell]
) -> Recording:
    columns = {item.cell.column.id for item in cells}
    proofs = [row for row in repository.all_proofs(study.fingerprint) if row.column.id in columns]
    took = check_seconds(
        [((row.column.id, row.route), row.created_at.timestamp(), row.result.launches) for row in proofs]
    )
    checks = tuple(
        RecordedCheck(
            row.column, row.cell_id, row.route, row.route_version, row.result, round(seconds, DIGITS)
        )
        for row, seconds in zip(proofs, took, strict=True)
    )
    with database.read() as session:
        chunks: dict[str, list[tuple[float, int]]] = {}
        for cell_id, moment, size in session.execute(
            select(RoundChunkRow.cell_id, RoundChunkRow.created_at, RoundChunkRow.size)
            .where(RoundChunkRow.study_id == study.id)
            .order_by(RoundChunkRow.cell_id, RoundChunkRow.first_round)
        ):
            chunks.setdefault(cell_id, []).append((moment.timestamp(), size))
        begun = session.scalars(select(TrialRow.started_at).where(TrialRow.study_id == study.id))
        retimed = session.scalars(select(RecheckRow.created_at).where(RecheckRow.study_id == study.id))
        moments = (*begun, *retimed, *(row.created_at for row in proofs))
        others = [moment.timestamp() for moment in moments]
    device = study.fingerprint.facts.device
    timed = [item.cell for item in cells if item.cell.id in chunks]
    seconds = chunk_seconds(
        {cell_id: [moment for moment, _ in found] for cell_id, found in chunks.items()},
        others,
        {cell.id: predict(cell, device) for cell in timed},
    )
    timings = {}
    for cell in timed:
        rounds = [_round(where, cell.id, data) for data in repository.rounds(study, cell)]
        sizes = [size for _, size in chunks[cell.id]]
        timings[cell.id] = RecordedTiming(
            pack(rounds),
            tuple(zip(sizes, (round(each, DIGITS) for each in seconds[cell.id]), strict=True)),
        )
    again = {
        cell_id: tuple(
            RecordedAgain(each.sampled, pack([_round(where, cell_id, data) for data in each.rounds]))
            for each in processes
        )
        for cell_id, processes in repository.rechecks(study).items()
    }
    return Recording(where, study, tuple(cells), checks, timings, repository.decisions(study), again)


def _round(where: str, cell_id: str, data: object) -> Round:
    try:
        return Round.from_dict(data)  # type: ignore[arg-type]
    except (TypeError, KeyError, ValueError) as error:
        raise RecordingError(
            f"{where}: a round of cell {cell_id} cannot be read: {json.dumps(str(error))}"
        ) from None
