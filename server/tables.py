"""The store's tables, the same on SQLite and PostgreSQL."""

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

# SQLite counts row ids in INTEGER columns only; both hold 64 bits.
BigId = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
    Column("mode", Text, nullable=False),
    Column("preset", Text, nullable=False),
    Column("plan_version", BigInteger, nullable=False),
    Column("plan", Text, nullable=False),
    Column("fallback_budget_used_ratio", Float),
    # Sampled steps with a loss, gradient norm or tensor that is not finite.
    Column("nonfinite_steps", BigInteger, nullable=False, server_default="0"),
    Column("created_at", Float, nullable=False),
    Column("last_report_at", Float, nullable=False),
    Column("ended_at", Float),
    # The baseline that the run is judged by, if any.
    Column("baseline_id", BigInteger),
    # A row id is never used twice, so it can name a page or a cache entry for ever.
    sqlite_autoincrement=True,
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("run_id", BigId, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("name", Text, nullable=False),
    Column("parent", Text),
    Column("from_step", BigInteger, nullable=False),
    Column("groups", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_decided_step", BigInteger),
    Column("policy_state", Text),
    # Samples refused because another client sends under the same run and attempt.
    Column("conflicts", BigInteger, nullable=False, server_default="0"),
    Column("last_conflict_step", BigInteger),
    # JSON list of the groups that said they have finished.
    Column("ended_groups", Text, nullable=False, server_default="[]"),
    UniqueConstraint("run_id", "name"),
    sqlite_autoincrement=True,
)

slot_lists = Table(
    "slot_lists",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("digest", Text, nullable=False, unique=True),
    Column("body", Text, nullable=False),
)

run_slot_lists = Table(
    "run_slot_lists",
    metadata,
    Column("run_id", BigId, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("slot_list_id", BigId, ForeignKey("slot_lists.id"), nullable=False),
    # Where each slot stands in the model's order, as the run first sent it.
    Column("indices", Text, nullable=False),
    UniqueConstraint("run_id", "slot_list_id"),
)

samples = Table(
    "samples",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("attempt_id", BigId, ForeignKey("attempts.id", ondelete="CASCADE"), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("group", Text, nullable=False),
    Column("part", Integer, nullable=False),
    Column("slot_list_id", BigId, ForeignKey("slot_lists.id"), nullable=False),
    Column("received_at", Float, nullable=False),
    Column("header", Text, nullable=False),
    Column("run_values", Text, nullable=False),
    Column("scalars", Text, nullable=False),
    # Wide columns last: SQLite then reads the narrow ones without their overflow pages.
    Column("columns", LargeBinary, nullable=False),
    Column("histograms", LargeBinary, nullable=False),
    UniqueConstraint("attempt_id", "step", "group", "part"),
    sqlite_autoincrement=True,
)

decisions = Table(
    "decisions",
    metadata,
    Column("number", BigId, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("run_id", BigId, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("layer", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("mode", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("plan_version", BigInteger),
    Column("effective_step", BigInteger),
    Column("body", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("decisions_by_run", "run_id", "number"),
    sqlite_autoincrement=True,
)

# Who did what when: rows are added, never changed.
audit_log = Table(
    "audit_log",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("run_id", BigId, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("actor", Text, nullable=False),
    # A state that a decision entered, or mode, thresholds, baseline, ended, pin, release, kill-switch.
    Column("what", Text, nullable=False),
    Column("decision_id", Text),
    Column("step", BigInteger),
    Column("body", Text, nullable=False),
    Index("audit_log_by_run", "run_id", "id"),
    Index("audit_log_by_decision", "decision_id", "id"),
    sqlite_autoincrement=True,
)

alerts = Table(
    "alerts",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("run_id", BigId, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("attempt_id", BigId, ForeignKey("attempts.id", ondelete="CASCADE"), nullable=False),
    Column("key", Text, nullable=False),
    Column("rule", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("layer", Text),
    Column("state", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("acknowledged_by", Text),
    Column("acknowledged_at", Float),
    Column("silenced_until", Float),
    # Times it was raised: a breach that comes back soon re-opens its alert.
    Column("occurrences", BigInteger, nullable=False, server_default="1"),
    # Of its first occurrence; null in rows of the first schema, whose body says it.
    Column("first_step", BigInteger),
    Column("raised_step", BigInteger),
    Column("silenced_by", Text),
    Column("resolved_at", Float),
    # Null where the alert resolved by itself.
    Column("resolved_by", Text),
    Column("resolved_step", BigInteger),
    Column("resolved_reason", Text),
    Index("alerts_by_run", "run_id", "id"),
    Index("alerts_by_key", "run_id", "state", "key"),
    sqlite_autoincrement=True,
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False, unique=True),
    # SHA-256 of the secret, in hex: the secret itself is nowhere.
    Column("digest", Text, nullable=False, unique=True),
    Column("scopes", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("last_used_at", Float),
    sqlite_autoincrement=True,
)

pins = Table(
    "pins",
    metadata,
    Column("run_id", BigId, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("layer", Text, primary_key=True),
    Column("target", Text, primary_key=True),
    Column("body", Text, nullable=False),
)

nonfinite_totals = Table(
    "nonfinite_totals",
    metadata,
    Column("run_id", BigId, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("layer", Text, primary_key=True),
    Column("operand", Text, primary_key=True),
    Column("total", BigInteger, nullable=False),
)

client_reports = Table(
    "client_reports",
    metadata,
    Column("attempt_id", BigId, ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True),
    Column("group", Text, primary_key=True),
    # coverage or sampling.
    Column("kind", Text, primary_key=True),
    # Of the sample that brought it.
    Column("step", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
)

baselines = Table(
    "baselines",
    metadata,
    Column("id", BigId, primary_key=True, autoincrement=True),
    # The run that it is for; which run it was learned from stands in the summary.
    Column("run_id", BigId, ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
    Column("digest", Text, nullable=False),
    Column("summary", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("body", Text, nullable=False),
    Index("baselines_by_run", "run_id", "id"),
    sqlite_autoincrement=True,
)
