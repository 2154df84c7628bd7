"""SQL views over the projections, one per question that people ask with SQL; the same text on SQLite and PostgreSQL.

docs/queries.md describes each with an example. They hold no data: the ledger is the truth, the tables are projections.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, inspect

VIEWS = {
    "latest_results": """
        SELECT result.* FROM workload_results result
        JOIN (SELECT max(sequence) AS sequence FROM workload_results GROUP BY policy_sha256, workload, ground) newest
        ON newest.sequence = result.sequence""",
    "latest_decisions": """
        SELECT decision.* FROM decisions decision
        JOIN (SELECT max(sequence) AS sequence FROM decisions GROUP BY run) newest
        ON newest.sequence = decision.sequence""",
    "run_overview": """
        SELECT runs.sequence, runs.run, runs."commit", runs.repository, runs.reference, runs.pull_request, runs.dirty,
               runs.ground, runs.policy, runs.policy_sha256, runs.rules_sha256, runs.started_at,
               (SELECT count(*) FROM workload_results result WHERE result.run = runs.run) AS results,
               (SELECT count(*) FROM workload_results result
                WHERE result.run = runs.run AND result.verdict = 'PASSED') AS passed,
               (SELECT count(*) FROM receipts receipt WHERE receipt.run = runs.run) AS receipts,
               (SELECT count(*) FROM receipts receipt
                WHERE receipt.run = runs.run AND receipt.status = 'CLEAN') AS clean,
               (SELECT decision.decision FROM decisions decision
                WHERE decision.run = runs.run ORDER BY decision.sequence DESC LIMIT 1) AS decision
        FROM runs""",
    "why_held": """
        SELECT decision.run, decision."commit", decision."row", reason.position, reason.reason, decision.decided_at
        FROM decisions decision JOIN decision_reasons reason ON reason.sequence = decision.sequence
        WHERE decision.decision = 'held' AND NOT EXISTS
        (SELECT 1 FROM decisions later WHERE later.run = decision.run AND later.sequence > decision.sequence)""",
    "metric_history": """
        SELECT criterion.name AS metric, criterion.measured, criterion.unit, criterion.threshold, criterion.direction,
               criterion.verdict, criterion.basis, result.sequence, result.run, result.attempt, result.workload,
               result.ground, result.card, result."commit", result.policy, result.policy_sha256, result.started_at
        FROM criteria criterion JOIN workload_results result ON result.sequence = criterion.sequence""",
    "device_history": """
        SELECT used.resource, used.at, used.token, used.sequence, used.run, runs."commit", runs.policy, runs.ground
        FROM device_uses used JOIN runs ON runs.run = used.run""",
    "artifact_uses": """
        SELECT artifact.sha256, artifact.name, artifact.size, artifact.media_type, artifact.private,
               artifact.projection_of, result.sequence, result.run, result.workload, result."commit"
        FROM artifacts artifact JOIN workload_results result ON result.sequence = artifact.sequence""",
    "approval_expiry": """
        SELECT approval.expires_at, approval.person, approval.action, approval."commit", approval.policy,
               approval.evidence_root, approval.rules_sha256, approval.signed_at, approval.sequence
        FROM approvals approval""",
}


def statements() -> Iterator[tuple[str, str]]:
    """Yield each view's name and the statement that creates it."""
    for name, query in VIEWS.items():
        yield name, f"CREATE VIEW {name} AS {_one_line(query)}"


def create(connection: Connection) -> None:
    """Create every view; the tables must exist and the views must not."""
    for _, statement in statements():
        connection.exec_driver_sql(statement)


def drop(connection: Connection) -> None:
    """Remove every view that is there; a migration that rebuilds tables drops them first and creates them after."""
    present = set(inspect(connection).get_view_names())
    for name in reversed(VIEWS):
        if name in present:
            connection.exec_driver_sql(f"DROP VIEW {name}")


def missing(connection: Connection) -> tuple[str, ...]:
    """Return the names of the views that are not there."""
    present = set(inspect(connection).get_view_names())
    return tuple(name for name in VIEWS if name not in present)


def _one_line(query: str) -> str:
    return " ".join(query.split())
