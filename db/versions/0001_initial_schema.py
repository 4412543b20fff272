"""Initial schema"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To 0001."""
    op.create_table(
        "grid_column",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("num_qo_heads", sa.Integer(), nullable=False),
        sa.Column("num_kv_heads", sa.Integer(), nullable=False),
        sa.Column("head_dim", sa.Integer(), nullable=False),
        sa.Column("page_size", sa.Integer(), nullable=False),
        sa.Column("kv_layout", sa.String(), nullable=False),
        sa.Column("q_dtype", sa.String(), nullable=False),
        sa.Column("kv_dtype", sa.String(), nullable=False),
        sa.Column("out_dtype", sa.String(), nullable=False),
        sa.Column("q_len", sa.Integer(), nullable=False),
        sa.Column("batch_size", sa.Integer(), nullable=False),
        sa.Column("max_context", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_grid_column")),
    )
    op.create_table(
        "hardware",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_hardware")),
    )
    op.create_table(
        "software",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_software")),
    )
    op.create_table(
        "proof",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hardware_id", sa.String(), nullable=False),
        sa.Column("software_id", sa.String(), nullable=False),
        sa.Column("column_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("route", sa.String(), nullable=False),
        sa.Column("route_version", sa.Integer(), nullable=False),
        sa.Column("check_name", sa.String(), nullable=False),
        sa.Column("check_version", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=True),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("launches", sa.Integer(), nullable=False),
        sa.Column("worst_error", sa.Double(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("requires", sa.JSON(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("placements", sa.JSON(), nullable=False),
        sa.Column("slack", sa.Integer(), nullable=False),
        sa.Column("repro", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["column_id"], ["grid_column.id"], name=op.f("fk_proof_column_id_grid_column")
        ),
        sa.ForeignKeyConstraint(["hardware_id"], ["hardware.id"], name=op.f("fk_proof_hardware_id_hardware")),
        sa.ForeignKeyConstraint(["software_id"], ["software.id"], name=op.f("fk_proof_software_id_software")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_proof")),
        sa.UniqueConstraint(
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
    with op.batch_alter_table("proof", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_proof_column_id"), ["column_id"], unique=False)

    op.create_table(
        "quarantine",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hardware_id", sa.String(), nullable=False),
        sa.Column("software_id", sa.String(), nullable=False),
        sa.Column("column_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("route", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["column_id"], ["grid_column.id"], name=op.f("fk_quarantine_column_id_grid_column")
        ),
        sa.ForeignKeyConstraint(
            ["hardware_id"], ["hardware.id"], name=op.f("fk_quarantine_hardware_id_hardware")
        ),
        sa.ForeignKeyConstraint(
            ["software_id"], ["software.id"], name=op.f("fk_quarantine_software_id_software")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quarantine")),
        sa.UniqueConstraint(
            "hardware_id", "software_id", "column_id", "cell_id", "route", name="uq_quarantine_key"
        ),
    )
    with op.batch_alter_table("quarantine", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_quarantine_column_id"), ["column_id"], unique=False)

    op.create_table(
        "selftest",
        sa.Column("hardware_id", sa.String(), nullable=False),
        sa.Column("software_id", sa.String(), nullable=False),
        sa.Column("code_version", sa.String(), nullable=False),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("results", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["hardware_id"], ["hardware.id"], name=op.f("fk_selftest_hardware_id_hardware")
        ),
        sa.ForeignKeyConstraint(
            ["software_id"], ["software.id"], name=op.f("fk_selftest_software_id_software")
        ),
        sa.PrimaryKeyConstraint("hardware_id", "software_id", "code_version", name=op.f("pk_selftest")),
    )
    op.create_table(
        "study",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("hardware_id", sa.String(), nullable=False),
        sa.Column("software_id", sa.String(), nullable=False),
        sa.Column("informative", sa.JSON(), nullable=False),
        sa.Column("space_name", sa.String(), nullable=False),
        sa.Column("space_digest", sa.String(), nullable=False),
        sa.Column("engine", sa.String(), nullable=False),
        sa.Column("objectives", sa.JSON(), nullable=False),
        sa.Column("margin", sa.Double(), nullable=False),
        sa.Column("multiplicity", sa.Integer(), nullable=False),
        sa.Column("unit", sa.String(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("code_version", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["hardware_id"], ["hardware.id"], name=op.f("fk_study_hardware_id_hardware")),
        sa.ForeignKeyConstraint(["software_id"], ["software.id"], name=op.f("fk_study_software_id_software")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_study")),
        sa.UniqueConstraint(
            "hardware_id", "software_id", "space_name", "space_digest", "engine", name="uq_study_key"
        ),
    )
    op.create_table(
        "cell",
        sa.Column("study_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("column_id", sa.String(), nullable=False),
        sa.Column("kv_low", sa.Integer(), nullable=False),
        sa.Column("kv_high", sa.Integer(), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["column_id"], ["grid_column.id"], name=op.f("fk_cell_column_id_grid_column")
        ),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_cell_study_id_study")),
        sa.PrimaryKeyConstraint("study_id", "cell_id", name=op.f("pk_cell")),
        sa.UniqueConstraint("study_id", "number", name=op.f("uq_cell_study_id_number")),
    )
    with op.batch_alter_table("cell", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_cell_column_id"), ["column_id"], unique=False)

    op.create_table(
        "export",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("study_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_export_study_id_study")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_export")),
    )
    with op.batch_alter_table("export", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_export_study_id"), ["study_id"], unique=False)

    op.create_table(
        "decision",
        sa.Column("study_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("route", sa.String(), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("speedup_low", sa.Double(), nullable=True),
        sa.Column("speedup", sa.Double(), nullable=True),
        sa.Column("vs_stock", sa.Double(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["study_id", "cell_id"],
            ["cell.study_id", "cell.cell_id"],
            name=op.f("fk_decision_study_id_cell_id_cell"),
        ),
        sa.PrimaryKeyConstraint("study_id", "cell_id", name=op.f("pk_decision")),
    )
    with op.batch_alter_table("decision", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_decision_study_id_reason"), ["study_id", "reason"], unique=False)

    op.create_table(
        "round_chunk",
        sa.Column("study_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("first_round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("rounds", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["study_id", "cell_id"],
            ["cell.study_id", "cell.cell_id"],
            name=op.f("fk_round_chunk_study_id_cell_id_cell"),
        ),
        sa.PrimaryKeyConstraint("study_id", "cell_id", "first_round", name=op.f("pk_round_chunk")),
    )
    op.create_table(
        "timing",
        sa.Column("study_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("route", sa.String(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("above", sa.Integer(), nullable=False),
        sa.Column("below", sa.Integer(), nullable=False),
        sa.Column("run_us", sa.Double(), nullable=True),
        sa.Column("host_us", sa.Double(), nullable=True),
        sa.Column("prepare_us", sa.Double(), nullable=True),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["study_id", "cell_id"],
            ["cell.study_id", "cell.cell_id"],
            name=op.f("fk_timing_study_id_cell_id_cell"),
        ),
        sa.PrimaryKeyConstraint("study_id", "cell_id", "route", name=op.f("pk_timing")),
    )
    op.create_table(
        "trial",
        sa.Column("study_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("optuna_number", sa.Integer(), nullable=False),
        sa.Column("optuna_id", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("kills", sa.Integer(), nullable=False),
        sa.Column("retries", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["study_id", "cell_id"],
            ["cell.study_id", "cell.cell_id"],
            name=op.f("fk_trial_study_id_cell_id_cell"),
        ),
        sa.PrimaryKeyConstraint("study_id", "cell_id", name=op.f("pk_trial")),
    )


def downgrade() -> None:
    """Back to nothing."""
    op.drop_table("trial")
    op.drop_table("timing")
    op.drop_table("round_chunk")
    with op.batch_alter_table("decision", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_decision_study_id_reason"))

    op.drop_table("decision")
    with op.batch_alter_table("export", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_export_study_id"))

    op.drop_table("export")
    with op.batch_alter_table("cell", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_cell_column_id"))

    op.drop_table("cell")
    op.drop_table("study")
    op.drop_table("selftest")
    with op.batch_alter_table("quarantine", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_quarantine_column_id"))

    op.drop_table("quarantine")
    with op.batch_alter_table("proof", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_proof_column_id"))

    op.drop_table("proof")
    op.drop_table("software")
    op.drop_table("hardware")
    op.drop_table("grid_column")
