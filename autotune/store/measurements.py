"""Raw rounds, what they say about each route, and the answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import and_, bindparam, func, select

from autotune.domain.cell import Cell
from autotune.domain.decision import Decision, Reason
from autotune.store.errors import RoundsConflictError
from autotune.store.models import DecisionRow, RoundChunkRow, TimingRow
from autotune.store.records import Study, Timing
from autotune.store.statements import Statements, table_of
from autotune.store.types import dumps, utc_now

# Built once: a study's every cell is asked for, and building it costs as much as running it.
_ROUNDS = (
    select(RoundChunkRow.first_round, RoundChunkRow.size, RoundChunkRow.rounds)
    .where(RoundChunkRow.study_id == bindparam("study"), RoundChunkRow.cell_id == bindparam("cell"))
    .order_by(RoundChunkRow.first_round)
)


class Measurements(Statements):
    """Rounds, timings and decisions of a study's cells."""

    def append_rounds(self, study: Study, cell: Cell, first: int, rounds: Sequence[Mapping[str, Any]]) -> int:
        """Commit raw rounds, before anything is concluded from them. The cost is that of the new ones.

        Args:
            first: index of the first of them; the number stored so far.
            rounds: JSON-ready, one mapping per round; finite numbers only.

        Returns:
            Rounds stored for the cell. A chunk that is stored already, equal in every value, changes nothing.

        Raises:
            RoundsConflictError: they leave a gap, or overlap stored rounds with other values.
            ValueError: a value is not JSON (NaN and infinity are not).
        """
        chunk = [dict(each) for each in rounds]
        text = dumps(chunk)
        table = table_of(RoundChunkRow)
        mine = and_(table.c.study_id == study.id, table.c.cell_id == cell.id)
        # should the commit fail, what is stored is anybody's guess: it is asked for again
        counts = self._round_counts.pop(study.id, None)
        with self.database.write() as connection:
            last = connection.execute(
                select(table.c.first_round, table.c.size)
                .where(mine)
                .order_by(table.c.first_round.desc())
                .limit(1)
            ).first()
            stored = last[0] + last[1] if last else 0
            if chunk and first != stored:
                same = connection.scalar(select(table.c.rounds).where(mine, table.c.first_round == first))
                if same is None or dumps(same) != text:
                    raise RoundsConflictError(
                        f"{self.database.where}: cell {cell.id} has {stored} rounds, so rounds from {first} "
                        "on do not continue it"
                    )
            elif chunk:
                connection.execute(
                    table.insert(),
                    {
                        "study_id": study.id,
                        "cell_id": cell.id,
                        "first_round": first,
                        "size": len(chunk),
                        "rounds": chunk,
                    },
                )
                stored += len(chunk)
        if counts is not None:
            counts[cell.id] = stored
            self._round_counts[study.id] = counts
        return stored

    def round_count(self, study: Study, cell: Cell) -> int:
        """How many rounds of a cell are stored. They are only ever appended: equal numbers, equal rounds.

        The database is asked once for a whole study; from then on this repository counts what it appends and
        what it reads. Rounds that another process appends (the study's lock keeps two runs apart, but an
        export takes none) are counted once they are read.
        """
        counts = self._round_counts.get(study.id)
        if counts is None:
            query = (
                select(RoundChunkRow.cell_id, func.sum(RoundChunkRow.size))
                .where(RoundChunkRow.study_id == study.id)
                .group_by(RoundChunkRow.cell_id)
            )
            with self.database.read_connection() as connection:
                counts = {cell_id: int(count) for cell_id, count in connection.execute(query)}
            self._round_counts[study.id] = counts
        return counts.get(cell.id, 0)

    def rounds(self, study: Study, cell: Cell) -> list[dict[str, Any]]:
        """Every stored round of a cell, in order.

        Raises:
            RoundsConflictError: some are missing, or bear other numbers: a test of those that happen to be
                left would not be the test whose error rate is promised.
        """
        found: list[dict[str, Any]] = []
        # a session would do no more than this connection does, at twice its cost
        with self.database.read_connection() as connection:
            for first, size, chunk in connection.execute(_ROUNDS, {"study": study.id, "cell": cell.id}):
                numbers = [each.get("index", first + i) for i, each in enumerate(chunk)]
                if first > len(found):
                    what = f"lacks rounds {len(found)} to {first - 1}"
                elif first < len(found) or len(chunk) != size or numbers != [*range(first, first + size)]:
                    what = f"has other rounds than {first} to {first + size - 1} under these numbers"
                else:
                    found += chunk
                    continue
                raise RoundsConflictError(
                    f"{self.database.where}: cell {cell.id} {what}: its speed cannot be judged; restore the "
                    "database from a copy, or name another one"
                )
        if (counts := self._round_counts.get(study.id)) is not None:
            counts[cell.id] = len(found)
        return found

    def save_timing(self, study: Study, cell: Cell, timing: Timing) -> None:
        """Store what the rounds say about one route, in place of an earlier statement."""
        self.save_timings(study, cell, [timing])

    def save_timings(self, study: Study, cell: Cell, timings: Iterable[Timing]) -> None:
        """Store what the rounds say about several routes, in place of earlier statements."""
        rows = [
            {
                "study_id": study.id,
                "cell_id": cell.id,
                "route": timing.route,
                "rounds": timing.rounds,
                "above": timing.above,
                "below": timing.below,
                "run_us": timing.run_us,
                "host_us": timing.host_us,
                "prepare_us": timing.prepare_us,
                "summary": dict(timing.summary),
                "updated_at": utc_now(),
            }
            for timing in timings
        ]
        if rows:
            with self.database.write() as connection:
                self._put(connection, TimingRow, ("study_id", "cell_id", "route"), rows)

    def timings(self, study: Study, cell: Cell) -> list[Timing]:
        """The stored statements about a cell's routes, by route."""
        query = (
            select(TimingRow)
            .where(TimingRow.study_id == study.id, TimingRow.cell_id == cell.id)
            .order_by(TimingRow.route)
        )
        with self.database.read() as session:
            return [_timing(row) for row in session.scalars(query)]

    def all_timings(self, study: Study) -> dict[str, list[Timing]]:
        """:meth:`timings` of every cell, by cell id."""
        query = select(TimingRow).where(TimingRow.study_id == study.id).order_by(TimingRow.route)
        found: dict[str, list[Timing]] = {}
        with self.database.read() as session:
            for row in session.scalars(query):
                found.setdefault(row.cell_id, []).append(_timing(row))
        return found

    def save_decision(self, study: Study, cell: Cell, decision: Decision) -> None:
        """Store a cell's answer, in place of an earlier one."""
        row = {
            "study_id": study.id,
            "cell_id": cell.id,
            "route": decision.route,
            "reason": decision.reason.value,
            "detail": decision.detail,
            "speedup_low": decision.speedup_low,
            "speedup": decision.speedup,
            "vs_stock": decision.vs_stock,
            "updated_at": utc_now(),
        }
        with self.database.write() as connection:
            self._put(connection, DecisionRow, ("study_id", "cell_id"), [row])

    def decisions(self, study: Study) -> dict[str, Decision]:
        """Every answer of a study, by cell id."""
        with self.database.read() as session:
            rows = session.scalars(select(DecisionRow).where(DecisionRow.study_id == study.id))
            return {
                row.cell_id: Decision(
                    route=row.route,
                    reason=Reason(row.reason),
                    detail=row.detail,
                    speedup_low=row.speedup_low,
                    speedup=row.speedup,
                    vs_stock=row.vs_stock,
                )
                for row in rows
            }


def _timing(row: TimingRow) -> Timing:
    return Timing(
        route=row.route,
        rounds=row.rounds,
        above=row.above,
        below=row.below,
        run_us=row.run_us,
        host_us=row.host_us,
        prepare_us=row.prepare_us,
        summary=row.summary,
    )
