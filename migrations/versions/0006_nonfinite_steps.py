"""Sixth schema: how many steps of a run were not finite."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision: str | None = "0005"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("nonfinite_steps", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("runs", "nonfinite_steps")
