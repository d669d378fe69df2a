"""First schema: runs, samples, decisions and alerts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None

# SQLite counts row ids in INTEGER columns only.
BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("preset", sa.Text(), nullable=False),
        sa.Column("plan_version", sa.BigInteger(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("fallback_budget_used_ratio", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_report_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "slot_lists",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "attempts",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("parent", sa.Text(), nullable=True),
        sa.Column("from_step", sa.BigInteger(), nullable=False),
        sa.Column("groups", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_decided_step", sa.BigInteger(), nullable=True),
        sa.Column("policy_state", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "decisions",
        sa.Column("number", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("layer", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("plan_version", sa.BigInteger(), nullable=True),
        sa.Column("effective_step", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("decisions_by_run", "decisions", ["run_id", "number"], unique=False)
    op.create_table(
        "nonfinite_totals",
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("layer", sa.Text(), nullable=False),
        sa.Column("operand", sa.Text(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "layer", "operand"),
    )
    op.create_table(
        "pins",
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("layer", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "layer", "target"),
    )
    op.create_table(
        "run_slot_lists",
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("slot_list_id", BIG_ID, nullable=False),
        sa.Column("indices", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["slot_list_id"],
            ["slot_lists.id"],
        ),
        sa.PrimaryKeyConstraint("run_id", "position"),
        sa.UniqueConstraint("run_id", "slot_list_id"),
    )
    op.create_table(
        "alerts",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG_ID, nullable=False),
        sa.Column("attempt_id", BIG_ID, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("layer", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("acknowledged_by", sa.Text(), nullable=True),
        sa.Column("acknowledged_at", sa.Float(), nullable=True),
        sa.Column("silenced_until", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index("alerts_by_key", "alerts", ["run_id", "state", "key"], unique=False)
    op.create_index("alerts_by_run", "alerts", ["run_id", "id"], unique=False)
    op.create_table(
        "samples",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("attempt_id", BIG_ID, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("group", sa.Text(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("slot_list_id", BIG_ID, nullable=False),
        sa.Column("received_at", sa.Float(), nullable=False),
        sa.Column("header", sa.Text(), nullable=False),
        sa.Column("run_values", sa.Text(), nullable=False),
        sa.Column("scalars", sa.Text(), nullable=False),
        sa.Column("columns", sa.LargeBinary(), nullable=False),
        sa.Column("histograms", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["slot_list_id"],
            ["slot_lists.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("attempt_id", "step", "group", "part"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    op.drop_table("samples")
    op.drop_index("alerts_by_run", table_name="alerts")
    op.drop_index("alerts_by_key", table_name="alerts")
    op.drop_table("alerts")
    op.drop_table("run_slot_lists")
    op.drop_table("pins")
    op.drop_table("nonfinite_totals")
    op.drop_index("decisions_by_run", table_name="decisions")
    op.drop_table("decisions")
    op.drop_table("attempts")
    op.drop_table("slot_lists")
    op.drop_table("runs")
