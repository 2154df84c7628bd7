"""The tables. ``ledger`` is the truth; every other table of evidence is a projection that can be made again from it.

A projected row carries the ``sequence`` of the ledger entry that it was made from, and ``position`` where one entry
makes several. Words are DESIGN's: PASSED, CLEAN, held. Measured figures are decimal text, stamps UTC text.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

Sequence = BigInteger().with_variant(Integer, "sqlite")
Digest = String(64)
CommitId = String(40)

identity = Table(
    "ledger_identity",
    metadata,
    Column("singleton", Integer, CheckConstraint("singleton = 1"), primary_key=True, autoincrement=False),
    Column("ledger", String(36), nullable=False),
    Column("genesis_hash", Digest, nullable=False),
)

ledger = Table(
    "ledger",
    metadata,
    Column("sequence", Sequence, CheckConstraint("sequence >= 1"), primary_key=True, autoincrement=False),
    Column("previous_hash", Digest, nullable=False, unique=True),
    Column("hash", Digest, nullable=False, unique=True),
    Column("envelope_sha256", Digest, nullable=False, unique=True),
    Column("envelope", LargeBinary, nullable=False),
)


def _sequence() -> Column[int]:
    return Column("sequence", Sequence, primary_key=True, autoincrement=False)


def _position() -> Column[int]:
    return Column("position", Integer, primary_key=True, autoincrement=False)


runs = Table(
    "runs",
    metadata,
    _sequence(),
    Column("run", Text, nullable=False, unique=True),
    Column("commit", CommitId, nullable=False),
    Column("tree", CommitId, nullable=False),
    Column("repository", Text, nullable=False),
    Column("reference", Text),
    Column("pull_request", Integer),
    Column("dirty", Boolean, nullable=False),
    Column("ground", Text, nullable=False),
    Column("policy", Text, nullable=False),
    Column("policy_sha256", Digest, nullable=False),
    Column("rules_sha256", Digest, nullable=False),
    Column("started_at", Text, nullable=False),
    Index("runs_by_commit", "commit"),
    Index("runs_by_pull_request", "pull_request"),
    Index("runs_by_policy", "policy_sha256"),
    Index("runs_by_policy_name", "policy", "sequence"),
    Index("runs_by_start", "started_at"),
)

workload_results = Table(
    "workload_results",
    metadata,
    _sequence(),
    Column("run", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("workload", Text, nullable=False),
    Column("commit", CommitId, nullable=False),
    Column("ground", Text, nullable=False),
    Column("card", Text),
    Column("policy", Text, nullable=False),
    Column("policy_sha256", Digest, nullable=False),
    Column("rules_sha256", Digest, nullable=False),
    Column("environment_sha256", Digest, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("started_at", Text, nullable=False),
    Column("duration_ms", BigInteger, nullable=False),
    Column("exit_code", Integer),
    Column("reason", Text),
    Index("workload_results_by_run", "run"),
    Index("workload_results_by_commit", "commit"),
    Index("workload_results_by_workload", "workload", "policy_sha256", "sequence"),
    Index("workload_results_by_policy_name", "workload", "policy", "sequence"),
    Index("workload_results_by_verdict", "verdict", "sequence"),
    Index("workload_results_by_workload_verdict", "workload", "verdict", "run"),
    Index("workload_results_by_card", "card", "sequence"),
    Index("workload_results_by_start", "started_at"),
)

criteria = Table(
    "criteria",
    metadata,
    _sequence(),
    _position(),
    Column("name", Text, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("basis", Text, nullable=False),
    Column("measured", Text),
    Column("threshold", Text),
    Column("direction", Text),
    Column("unit", Text),
    Column("reason", Text),
    Index("criteria_by_name", "name", "sequence"),
)

artifacts = Table(
    "artifacts",
    metadata,
    _sequence(),
    _position(),
    Column("name", Text, nullable=False),
    Column("sha256", Digest, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("media_type", Text, nullable=False),
    Column("private", Boolean, nullable=False),
    Column("projection_of", Digest),
    Index("artifacts_by_digest", "sha256"),
)

receipts = Table(
    "receipts",
    metadata,
    _sequence(),
    Column("run", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("commit", CommitId, nullable=False),
    Column("status", Text, nullable=False),
    Column("exit_code", Integer),
    Column("timed_out", Boolean, nullable=False),
    Column("recovered", Boolean, nullable=False),
    Column("taken_at", Text, nullable=False),
    Column("reason", Text),
    Index("receipts_by_run", "run"),
    Index("receipts_by_status", "status", "sequence"),
)

devices = Table(
    "device_uses",
    metadata,
    _sequence(),
    _position(),
    Column("run", Text, nullable=False),
    Column("resource", Text, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("at", Text, nullable=False),
    Index("device_uses_by_resource", "resource", "at"),
)

decisions = Table(
    "decisions",
    metadata,
    _sequence(),
    Column("run", Text, nullable=False),
    Column("commit", CommitId, nullable=False),
    Column("decision", Text, nullable=False),
    Column("row", Text, nullable=False),
    Column("evidence_root", Digest, nullable=False),
    Column("rules_sha256", Digest, nullable=False),
    Column("ledger_size", BigInteger, nullable=False),
    Column("ledger_root", Digest, nullable=False),
    Column("decided_at", Text, nullable=False),
    Index("decisions_by_run", "run"),
    Index("decisions_by_commit", "commit"),
    Index("decisions_by_decision", "decision", "sequence"),
)

reasons = Table(
    "decision_reasons",
    metadata,
    _sequence(),
    _position(),
    Column("reason", Text, nullable=False),
)


def _words(name: str) -> Table:
    return Table(
        name,
        metadata,
        _sequence(),
        Column("action", Text, nullable=False),
        Column("person", Text, nullable=False),
        Column("role", Text, nullable=False),
        Column("commit", CommitId, nullable=False),
        Column("policy", Text, nullable=False),
        Column("evidence_root", Digest),
        Column("rules_sha256", Digest),
        Column("signed_at", Text, nullable=False),
        Column("expires_at", Text, nullable=False),
        Column("note", Text),
        Index(f"{name}_by_commit", "commit"),
        Index(f"{name}_by_expiry", "expires_at"),
    )


approvals = _words("approvals")
permissions = _words("permissions")

tombstones = Table(
    "tombstones",
    metadata,
    _sequence(),
    _position(),
    Column("sha256", Digest, nullable=False),
    Column("reason", Text, nullable=False),
    Column("removed_at", Text, nullable=False),
    Index("tombstones_by_digest", "sha256"),
)

publications = Table(
    "publications",
    metadata,
    _sequence(),
    Column("run", Text, nullable=False),
    Column("commit", CommitId, nullable=False),
    Column("context", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("published", Boolean, nullable=False),
    Column("published_at", Text, nullable=False),
    Column("reason", Text),
    Index("publications_by_commit", "commit", "context", "sequence"),
)

PROJECTIONS: tuple[Table, ...] = (
    runs,
    workload_results,
    criteria,
    artifacts,
    receipts,
    devices,
    decisions,
    reasons,
    approvals,
    permissions,
    tombstones,
    publications,
)
"""Every table that ``qualify db rebuild`` makes again from the ledger."""
