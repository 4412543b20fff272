"""Rounds of cells that were timed again in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, select

from autotune.domain.cell import Cell
from autotune.store.errors import RoundsConflictError
from autotune.store.models import RecheckRow
from autotune.store.records import Recheck, Study
from autotune.store.statements import Statements, table_of
from autotune.store.types import dumps


class Rechecks(Statements):
    """Second and later processes of a study's cells."""

    def append_recheck(
        self,
        study: Study,
        cell: Cell,
        process: int,
        first: int,
        rounds: Sequence[Mapping[str, Any]],
        *,
        sampled: bool,
    ) -> None:
        """Commit raw rounds of a cell's ``process``, before anything is concluded from them.

        Args:
            process: counted from 1; a child begins a number of its own, so that a killed one is never
                continued by another under its number.
            first: index of the first of them; the number stored for this process so far.

        Raises:
            RoundsConflictError: they do not continue the process's stored rounds, or leave a process out.
            ValueError: ``process`` or ``first`` makes no sense, there are no rounds, or a value is not JSON.
        """
        chunk = [dict(each) for each in rounds]
        if process < 1 or first < 0 or not chunk:
            raise ValueError(
                f"process {process}, first round {first}, {len(chunk)} rounds: nothing to append"
            )
        dumps(chunk)
        table = table_of(RecheckRow)
        mine = and_(table.c.study_id == study.id, table.c.cell_id == cell.id)
        with self.database.write() as connection:
            last = connection.execute(
                select(table.c.process, table.c.first_round, table.c.size, table.c.sampled)
                .where(mine)
                .order_by(table.c.process.desc(), table.c.first_round.desc())
                .limit(1)
            ).first()
            known, stored = (last.process, last.first_round + last.size) if last else (0, 0)
            continues = process == known and first == stored and last is not None and last.sampled == sampled
            if not continues and (process, first) != (known + 1, 0):
                raise RoundsConflictError(
                    f"{self.database.where}: cell {cell.id} was last re-timed by process {known}, for "
                    f"{stored} rounds, so rounds from {first} on of process {process} do not continue it"
                )
            connection.execute(
                table.insert(),
                {
                    "study_id": study.id,
                    "cell_id": cell.id,
                    "process": process,
                    "first_round": first,
                    "size": len(chunk),
                    "sampled": sampled,
                    "rounds": chunk,
                },
            )

    def rechecks(self, study: Study) -> dict[str, list[Recheck]]:
        """Every later process of every cell that has one, by cell id, in the order they were begun.

        Raises:
            RoundsConflictError: rounds are missing, or bear other numbers.
        """
        query = (
            select(RecheckRow)
            .where(RecheckRow.study_id == study.id)
            .order_by(RecheckRow.cell_id, RecheckRow.process, RecheckRow.first_round)
        )
        found: dict[str, list[Recheck]] = {}
        with self.database.read() as session:
            for row in session.scalars(query):
                mine = found.setdefault(row.cell_id, [])
                if len(mine) < row.process:
                    mine.append(Recheck(len(mine) + 1, row.sampled, ()))
                before = mine[-1].rounds
                numbers = [each.get("index", row.first_round + i) for i, each in enumerate(row.rounds)]
                wanted = [*range(len(before), len(before) + row.size)]
                if row.process != len(mine) or row.first_round != len(before) or numbers != wanted:
                    raise RoundsConflictError(
                        f"{self.database.where}: cell {row.cell_id} lacks rounds before round "
                        f"{row.first_round} of its process {row.process}, or has others under their numbers: "
                        "restore the database from a copy, or name another one"
                    )
                mine[-1] = Recheck(row.process, row.sampled, (*before, *row.rounds))
        return found
