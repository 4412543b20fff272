"""Fingerprints and studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from autotune.domain.fingerprint import Facts
from autotune.domain.identity import stable_id
from autotune.store.errors import StudyMismatchError, UnknownStudyError
from autotune.store.models import HardwareRow, SoftwareRow, StudyRow
from autotune.store.records import Fingerprint, Study
from autotune.store.statements import Statements


class Studies(Statements):
    """Who measured, and under which fixed error rate."""

    def register_fingerprint(self, facts: Facts) -> Fingerprint:
        """Store the facts once; equal facts give an equal fingerprint."""
        fingerprint = Fingerprint.of(facts)
        with self.database.write() as connection:
            self._add(
                connection,
                HardwareRow,
                id=fingerprint.hardware_id,
                device=facts.device,
                name=str(facts.hardware.get("name", "")),
                facts=dict(facts.hardware),
            )
            self._add(
                connection,
                SoftwareRow,
                id=fingerprint.software_id,
                device=facts.device,
                facts=dict(facts.software),
            )
        return fingerprint

    def find_study(
        self, fingerprint: Fingerprint, space_name: str, space_digest: str, engine: str
    ) -> Study | None:
        """The study that ``open_study`` with these four would resume, or None."""
        with self.database.read() as session:
            row = session.get(StudyRow, _study_id(fingerprint, space_name, space_digest, engine))
            return None if row is None else _study(session, row)

    def open_study(
        self,
        fingerprint: Fingerprint,
        *,
        space_name: str,
        space_digest: str,
        engine: str,
        objectives: Sequence[str],
        margin: float,
        multiplicity: int,
        unit: str,
        seed: int,
        code_version: str,
    ) -> Study:
        """Create the study of this fingerprint, space and engine, or resume it.

        Margin, multiplicity, unit and objectives are fixed when it is created. So are seed and code version,
        but another value of these is no contradiction: the stored one is returned.

        Args:
            fingerprint: from ``register_fingerprint``.

        Raises:
            StudyMismatchError: it exists with another margin, multiplicity, unit or objectives.
        """
        study_id = _study_id(fingerprint, space_name, space_digest, engine)
        with self.database.write() as connection:
            created = self._add(
                connection,
                StudyRow,
                id=study_id,
                hardware_id=fingerprint.hardware_id,
                software_id=fingerprint.software_id,
                informative=dict(fingerprint.facts.informative),
                space_name=space_name,
                space_digest=space_digest,
                engine=engine,
                objectives=list(objectives),
                margin=margin,
                multiplicity=multiplicity,
                unit=unit,
                seed=seed,
                code_version=code_version,
            )
        study = self.study(study_id)
        for name, asked in (
            ("objectives", tuple(objectives)),
            ("margin", margin),
            ("multiplicity", multiplicity),
            ("unit", unit),
        ):
            stored = getattr(study, name)
            if stored != asked:
                raise StudyMismatchError(
                    f"{self.database.where}: study {study_id} was created with {name} {_shown(stored)}, not "
                    f"{_shown(asked)}; its error rate holds only unchanged, so name another database"
                )
        return replace(study, resumed=not created)

    def study(self, study_id: str) -> Study:
        """A study by its id. Raises ``UnknownStudyError``."""
        with self.database.read() as session:
            row = session.get(StudyRow, study_id)
            if row is None:
                raise UnknownStudyError(f"{self.database.where}: has no study {study_id!r}")
            return _study(session, row)

    def studies(self) -> list[Study]:
        """Every study, oldest first."""
        with self.database.read() as session:
            rows = session.scalars(select(StudyRow).order_by(StudyRow.created_at, StudyRow.id))
            return [_study(session, row) for row in rows]


def _study_id(fingerprint: Fingerprint, space_name: str, space_digest: str, engine: str) -> str:
    return stable_id([fingerprint.hardware_id, fingerprint.software_id, space_name, space_digest, engine])


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _study(session: Session, row: StudyRow) -> Study:
    hardware = session.get_one(HardwareRow, row.hardware_id)
    software = session.get_one(SoftwareRow, row.software_id)
    facts = Facts(hardware.device, hardware.facts, software.facts, row.informative)
    return Study(
        id=row.id,
        fingerprint=Fingerprint(row.hardware_id, row.software_id, facts),
        space_name=row.space_name,
        space_digest=row.space_digest,
        engine=row.engine,
        objectives=tuple(row.objectives),
        margin=row.margin,
        multiplicity=row.multiplicity,
        unit=row.unit,
        seed=row.seed,
        code_version=row.code_version,
        created_at=row.created_at,
    )
