"""Rounds of cells that were timed again in another process"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To 0003."""
    op.create_table(
        "recheck",
        sa.Column("study_id", sa.String(), nullable=False),
        sa.Column("cell_id", sa.String(), nullable=False),
        sa.Column("process", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("first_round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("sampled", sa.Boolean(), nullable=False),
        sa.Column("rounds", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["study_id", "cell_id"],
            ["cell.study_id", "cell.cell_id"],
            name=op.f("fk_recheck_study_id_cell_id_cell"),
        ),
        sa.PrimaryKeyConstraint("study_id", "cell_id", "process", "first_round", name=op.f("pk_recheck")),
    )


def downgrade() -> None:
    """Back to 0002."""
    op.drop_table("recheck")
