"""Chunks of rounds that a child took with it, counted with its cell's trial"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """To 0002."""
    op.add_column("trial", sa.Column("lost", sa.Integer(), server_default="0", nullable=False))


def downgrade() -> None:
    """Back to 0001."""
    with op.batch_alter_table("trial", schema=None) as batch_op:
        batch_op.drop_column("lost")
