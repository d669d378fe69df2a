"""Fourth schema: baselines, and the one that a run is judged by."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision: str | None = "0003"
branch_labels: str | None = None
depends_on: str | None = None

# SQLite counts row ids in INTEGER columns only.
BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "baselines",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("baselines_by_run", "baselines", ["run_id", "id"])
    # No foreign key: both tables would need the other first. Who deletes a baseline takes it out here.
    op.add_column("runs", sa.Column("baseline_id", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "baseline_id")
    op.drop_index("baselines_by_run", "baselines")
    op.drop_table("baselines")
