"""Indexes for questions that name a policy by its name, or a workload and a verdict."""

from alembic import op

revision = "0004"
down_revision = "0003"

INDEXES = {
    "runs_by_policy_name": ("runs", ["policy", "sequence"]),
    "workload_results_by_policy_name": ("workload_results", ["workload", "policy", "sequence"]),
    "workload_results_by_workload_verdict": ("workload_results", ["workload", "verdict", "run"]),
}


def upgrade() -> None:
    for name, (table, columns) in INDEXES.items():
        op.create_index(name, table, columns)


def downgrade() -> None:
    for name, (table, _) in INDEXES.items():
        op.drop_index(name, table)
