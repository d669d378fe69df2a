"""Second schema: tokens, an alert's whole life, conflicts and ended groups."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"
branch_labels: str | None = None
depends_on: str | None = None

# SQLite counts row ids in INTEGER columns only.
BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

_ALERT_COLUMNS: dict[str, type[sa.types.TypeEngine[Any]]] = {
    "first_step": sa.BigInteger,
    "raised_step": sa.BigInteger,
    "silenced_by": sa.Text,
    "resolved_at": sa.Float,
    "resolved_by": sa.Text,
    "resolved_step": sa.BigInteger,
    "resolved_reason": sa.Text,
}

alerts = sa.table(
    "alerts",
    *(sa.column(name) for name in ("id", "run_id", "key", "rule", "layer", "state", "resolved_reason")),
)


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", BIG_ID, autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.Column("last_used_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
        sa.UniqueConstraint("digest"),
        sqlite_autoincrement=True,
    )
    # Existing rows need a value at once, hence the defaults; SQLite adds such columns without a copy.
    conflicts = sa.Column("conflicts", sa.BigInteger(), nullable=False, server_default="0")
    ended_groups = sa.Column("ended_groups", sa.Text(), nullable=False, server_default="[]")
    op.add_column("attempts", conflicts)
    op.add_column("attempts", sa.Column("last_conflict_step", sa.BigInteger(), nullable=True))
    op.add_column("attempts", ended_groups)
    occurrences = sa.Column("occurrences", sa.BigInteger(), nullable=False, server_default="1")
    op.add_column("alerts", occurrences)
    for name, kind in _ALERT_COLUMNS.items():
        op.add_column("alerts", sa.Column(name, kind, nullable=True))
    _group_alerts()


def _group_alerts() -> None:
    """An alert is one rule of one layer now: the oldest open one of each stays, and says so for the others."""
    conn = op.get_bind()
    key = alerts.c.rule + "|" + sa.func.coalesce(alerts.c.layer, "")
    conn.execute(alerts.update().values(key=key))
    oldest = sa.select(sa.func.min(alerts.c.id)).where(alerts.c.state == "open")
    oldest = oldest.group_by(alerts.c.run_id, alerts.c.key)
    others = (alerts.c.state == "open", alerts.c.id.not_in(oldest.scalar_subquery()))
    reason = "joined with the older alert of the same rule and layer"
    conn.execute(alerts.update().where(*others).values(state="resolved", resolved_reason=reason))


def downgrade() -> None:
    for name in (*reversed(_ALERT_COLUMNS), "occurrences"):
        op.drop_column("alerts", name)
    for name in ("ended_groups", "last_conflict_step", "conflicts"):
        op.drop_column("attempts", name)
    op.drop_table("tokens")
