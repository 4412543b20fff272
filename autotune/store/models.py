"""The tables. Their history is in ``db/versions``; a test holds the two equal.

No name here is one of Optuna's (``studies``, ``trials``, ``version_info``, ``alembic_version``, ...), whose
tables lie in the same database. JSON is plain ``JSON`` on PostgreSQL too: ``JSONB`` would turn ``1e22`` into
an integer, and the type of a fact counts. Names avoid SQL's reserved words, so that people can query.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from autotune.store.types import ExactFloat, SafeText, UtcDateTime, utc_now


class Base(DeclarativeBase):
    """Declarative base; constraints get names, so that a later migration can change them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        str: String,
        int: Integer,
        bool: Boolean,
        float: ExactFloat,
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        list[str]: JSON,
        list[Any]: JSON,
    }


class HardwareRow(Base):
    """The binding hardware facts of a fingerprint; ``id`` is the identity of ``facts`` and ``device``."""

    __tablename__ = "hardware"

    id: Mapped[str] = mapped_column(primary_key=True)
    device: Mapped[str]
    name: Mapped[str] = mapped_column(SafeText)
    facts: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class SoftwareRow(Base):
    """The binding software facts of a fingerprint."""

    __tablename__ = "software"

    id: Mapped[str] = mapped_column(primary_key=True)
    device: Mapped[str]
    facts: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class StudyRow(Base):
    """One search on one fingerprint. Every field is fixed at creation: the error rate hangs on them."""

    __tablename__ = "study"
    __table_args__ = (
        UniqueConstraint(
            "hardware_id", "software_id", "space_name", "space_digest", "engine", name="uq_study_key"
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    hardware_id: Mapped[str] = mapped_column(ForeignKey("hardware.id"))
    software_id: Mapped[str] = mapped_column(ForeignKey("software.id"))
    informative: Mapped[dict[str, Any]]
    space_name: Mapped[str]
    space_digest: Mapped[str]
    engine: Mapped[str]
    objectives: Mapped[list[str]]
    margin: Mapped[float]
    multiplicity: Mapped[int]
    unit: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    code_version: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class ColumnRow(Base):
    """What a proof is about: shape, dtypes, q_len, batch. ``spec`` is ``Column.to_dict()``."""

    __tablename__ = "grid_column"

    id: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[dict[str, Any]]
    num_qo_heads: Mapped[int]
    num_kv_heads: Mapped[int]
    head_dim: Mapped[int]
    page_size: Mapped[int]
    kv_layout: Mapped[str]
    q_dtype: Mapped[str]
    kv_dtype: Mapped[str]
    out_dtype: Mapped[str]
    q_len: Mapped[int]
    batch_size: Mapped[int]
    max_context: Mapped[int]


class CellRow(Base):
    """A column and a KV row, as one study has it. ``number`` is the integer that Optuna's trials carry."""

    __tablename__ = "cell"
    __table_args__ = (UniqueConstraint("study_id", "number"),)

    study_id: Mapped[str] = mapped_column(ForeignKey("study.id"), primary_key=True)
    cell_id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int]
    position: Mapped[int]
    column_id: Mapped[str] = mapped_column(ForeignKey("grid_column.id"), index=True)
    kv_low: Mapped[int]
    kv_high: Mapped[int]
    models: Mapped[list[str]]


def _cell_key() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["study_id", "cell_id"], ["cell.study_id", "cell.cell_id"])


class TrialRow(Base):
    """A cell's place in the Optuna study: its latest trial there, and how often it was begun again."""

    __tablename__ = "trial"
    __table_args__ = (_cell_key(),)

    study_id: Mapped[str] = mapped_column(primary_key=True)
    cell_id: Mapped[str] = mapped_column(primary_key=True)
    optuna_number: Mapped[int]
    optuna_id: Mapped[int]
    state: Mapped[str]
    kills: Mapped[int] = mapped_column(default=0)
    retries: Mapped[int] = mapped_column(default=0)
    lost: Mapped[int] = mapped_column(default=0, server_default="0")
    started_at: Mapped[datetime] = mapped_column(default=utc_now)
    finished_at: Mapped[datetime | None]


class ProofRow(Base):
    """One check of one route in one column on one fingerprint; any study on that fingerprint may use it.

    ``cell_id`` is empty for the column as a whole, else the cell whose own launch this is.
    """

    __tablename__ = "proof"
    __table_args__ = (
        UniqueConstraint(
            "hardware_id",
            "software_id",
            "column_id",
            "cell_id",
            "route",
            "route_version",
            "check_name",
            "check_version",
            name="uq_proof_key",
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    hardware_id: Mapped[str] = mapped_column(ForeignKey("hardware.id"))
    software_id: Mapped[str] = mapped_column(ForeignKey("software.id"))
    column_id: Mapped[str] = mapped_column(ForeignKey("grid_column.id"), index=True)
    cell_id: Mapped[str]
    route: Mapped[str]
    route_version: Mapped[int]
    check_name: Mapped[str]
    check_version: Mapped[int]
    status: Mapped[str]
    kind: Mapped[str | None]
    reason: Mapped[str | None]
    detail: Mapped[str] = mapped_column(SafeText)
    launches: Mapped[int]
    worst_error: Mapped[float | None]
    seed: Mapped[int] = mapped_column(BigInteger)
    requires: Mapped[list[str]]
    limits: Mapped[list[str]]
    placements: Mapped[list[str]]
    slack: Mapped[int]
    repro: Mapped[str] = mapped_column(SafeText)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class RoundChunkRow(Base):
    """Raw rounds ``first_round .. first_round + size - 1`` of a cell, as they were committed; append only."""

    __tablename__ = "round_chunk"
    __table_args__ = (_cell_key(),)

    study_id: Mapped[str] = mapped_column(primary_key=True)
    cell_id: Mapped[str] = mapped_column(primary_key=True)
    first_round: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    size: Mapped[int]
    rounds: Mapped[list[Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class RecheckRow(Base):
    """Raw rounds of a cell that was timed again in another fresh child; append only.

    ``process`` numbers the children that timed the cell again, from 1; ``first_round`` counts from 0 in each.
    ``sampled``: the child was begun since a seeded rule drew the cell, not since its claim was a near one.
    """

    __tablename__ = "recheck"
    __table_args__ = (_cell_key(),)

    study_id: Mapped[str] = mapped_column(primary_key=True)
    cell_id: Mapped[str] = mapped_column(primary_key=True)
    process: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_round: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    size: Mapped[int]
    sampled: Mapped[bool]
    rounds: Mapped[list[Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class TimingRow(Base):
    """What the rounds of a cell say about one route; derived, so written anew when rounds are added."""

    __tablename__ = "timing"
    __table_args__ = (_cell_key(),)

    study_id: Mapped[str] = mapped_column(primary_key=True)
    cell_id: Mapped[str] = mapped_column(primary_key=True)
    route: Mapped[str] = mapped_column(primary_key=True)
    rounds: Mapped[int]
    above: Mapped[int]
    below: Mapped[int]
    run_us: Mapped[float | None]
    host_us: Mapped[float | None]
    prepare_us: Mapped[float | None]
    summary: Mapped[dict[str, Any]]
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)


class DecisionRow(Base):
    """The answer for a cell; derived."""

    __tablename__ = "decision"
    __table_args__ = (_cell_key(), Index(None, "study_id", "reason"))

    study_id: Mapped[str] = mapped_column(primary_key=True)
    cell_id: Mapped[str] = mapped_column(primary_key=True)
    route: Mapped[str | None]
    reason: Mapped[str]
    detail: Mapped[str] = mapped_column(SafeText)
    speedup_low: Mapped[float | None]
    speedup: Mapped[float | None]
    vs_stock: Mapped[float | None]
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)


class ExportRow(Base):
    """A file written from a study."""

    __tablename__ = "export"

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[str] = mapped_column(ForeignKey("study.id"), index=True)
    kind: Mapped[str]
    path: Mapped[str] = mapped_column(SafeText)
    digest: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class QuarantineRow(Base):
    """A route that a person has set aside in a column or a cell, whatever was proven."""

    __tablename__ = "quarantine"
    __table_args__ = (
        UniqueConstraint(
            "hardware_id", "software_id", "column_id", "cell_id", "route", name="uq_quarantine_key"
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    hardware_id: Mapped[str] = mapped_column(ForeignKey("hardware.id"))
    software_id: Mapped[str] = mapped_column(ForeignKey("software.id"))
    column_id: Mapped[str] = mapped_column(ForeignKey("grid_column.id"), index=True)
    cell_id: Mapped[str]
    route: Mapped[str]
    reason: Mapped[str] = mapped_column(SafeText)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class SelftestRow(Base):
    """The controls of one code version on one fingerprint: a run with equal ones need not repeat them."""

    __tablename__ = "selftest"

    hardware_id: Mapped[str] = mapped_column(ForeignKey("hardware.id"), primary_key=True)
    software_id: Mapped[str] = mapped_column(ForeignKey("software.id"), primary_key=True)
    code_version: Mapped[str] = mapped_column(primary_key=True)
    passed: Mapped[bool]
    results: Mapped[list[Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
