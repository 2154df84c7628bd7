"""The ledger, its protections, and the projections."""

from uuid import uuid4

import sqlalchemy as sa
from alembic import op

from db import protections
from qualification.errors import QualificationError
from qualification.evidence.chain import genesis_hash

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table('approvals',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('action', sa.Text(), nullable=False),
        sa.Column('person', sa.Text(), nullable=False),
        sa.Column('role', sa.Text(), nullable=False),
        sa.Column('commit', sa.String(length=40), nullable=False),
        sa.Column('policy', sa.Text(), nullable=False),
        sa.Column('evidence_root', sa.String(length=64), nullable=True),
        sa.Column('rules_sha256', sa.String(length=64), nullable=True),
        sa.Column('signed_at', sa.Text(), nullable=False),
        sa.Column('expires_at', sa.Text(), nullable=False),
        sa.Column('note', sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint('sequence')
    )
    op.create_index('approvals_by_commit', 'approvals', ['commit'], unique=False)
    op.create_index('approvals_by_expiry', 'approvals', ['expires_at'], unique=False)
    op.create_table('artifacts',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('position', sa.Integer(), autoincrement=False, nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('sha256', sa.String(length=64), nullable=False),
        sa.Column('size', sa.BigInteger(), nullable=False),
        sa.Column('media_type', sa.Text(), nullable=False),
        sa.Column('private', sa.Boolean(), nullable=False),
        sa.Column('projection_of', sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint('sequence', 'position')
    )
    op.create_index('artifacts_by_digest', 'artifacts', ['sha256'], unique=False)
    op.create_table('criteria',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('position', sa.Integer(), autoincrement=False, nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('verdict', sa.Text(), nullable=False),
        sa.Column('basis', sa.Text(), nullable=False),
        sa.Column('measured', sa.Text(), nullable=True),
        sa.Column('threshold', sa.Text(), nullable=True),
        sa.Column('direction', sa.Text(), nullable=True),
        sa.Column('unit', sa.Text(), nullable=True),
        sa.Column('reason', sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint('sequence', 'position')
    )
    op.create_index('criteria_by_name', 'criteria', ['name', 'sequence'], unique=False)
    op.create_table('decision_reasons',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('position', sa.Integer(), autoincrement=False, nullable=False),
        sa.Column('reason', sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint('sequence', 'position')
    )
    op.create_table('decisions',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('run', sa.Text(), nullable=False),
        sa.Column('commit', sa.String(length=40), nullable=False),
        sa.Column('decision', sa.Text(), nullable=False),
        sa.Column('row', sa.Text(), nullable=False),
        sa.Column('evidence_root', sa.String(length=64), nullable=False),
        sa.Column('rules_sha256', sa.String(length=64), nullable=False),
        sa.Column('ledger_size', sa.BigInteger(), nullable=False),
        sa.Column('ledger_root', sa.String(length=64), nullable=False),
        sa.Column('decided_at', sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint('sequence')
    )
    op.create_index('decisions_by_commit', 'decisions', ['commit'], unique=False)
    op.create_index('decisions_by_decision', 'decisions', ['decision', 'sequence'], unique=False)
    op.create_index('decisions_by_run', 'decisions', ['run'], unique=False)
    op.create_table('device_uses',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('position', sa.Integer(), autoincrement=False, nullable=False),
        sa.Column('run', sa.Text(), nullable=False),
        sa.Column('resource', sa.Text(), nullable=False),
        sa.Column('token', sa.BigInteger(), nullable=False),
        sa.Column('at', sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint('sequence', 'position')
    )
    op.create_index('device_uses_by_resource', 'device_uses', ['resource', 'at'], unique=False)
    op.create_table('ledger',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('previous_hash', sa.String(length=64), nullable=False),
        sa.Column('hash', sa.String(length=64), nullable=False),
        sa.Column('envelope_sha256', sa.String(length=64), nullable=False),
        sa.Column('envelope', sa.LargeBinary(), nullable=False),
        sa.CheckConstraint('sequence >= 1'),
        sa.PrimaryKeyConstraint('sequence'),
        sa.UniqueConstraint('envelope_sha256'),
        sa.UniqueConstraint('hash'),
        sa.UniqueConstraint('previous_hash')
    )
    op.create_table('ledger_identity',
        sa.Column('singleton', sa.Integer(), autoincrement=False, nullable=False),
        sa.Column('ledger', sa.String(length=36), nullable=False),
        sa.Column('genesis_hash', sa.String(length=64), nullable=False),
        sa.CheckConstraint('singleton = 1'),
        sa.PrimaryKeyConstraint('singleton')
    )
    op.create_table('permissions',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('action', sa.Text(), nullable=False),
        sa.Column('person', sa.Text(), nullable=False),
        sa.Column('role', sa.Text(), nullable=False),
        sa.Column('commit', sa.String(length=40), nullable=False),
        sa.Column('policy', sa.Text(), nullable=False),
        sa.Column('evidence_root', sa.String(length=64), nullable=True),
        sa.Column('rules_sha256', sa.String(length=64), nullable=True),
        sa.Column('signed_at', sa.Text(), nullable=False),
        sa.Column('expires_at', sa.Text(), nullable=False),
        sa.Column('note', sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint('sequence')
    )
    op.create_index('permissions_by_commit', 'permissions', ['commit'], unique=False)
    op.create_index('permissions_by_expiry', 'permissions', ['expires_at'], unique=False)
    op.create_table('receipts',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('run', sa.Text(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('commit', sa.String(length=40), nullable=False),
        sa.Column('status', sa.Text(), nullable=False),
        sa.Column('exit_code', sa.Integer(), nullable=True),
        sa.Column('timed_out', sa.Boolean(), nullable=False),
        sa.Column('recovered', sa.Boolean(), nullable=False),
        sa.Column('taken_at', sa.Text(), nullable=False),
        sa.Column('reason', sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint('sequence')
    )
    op.create_index('receipts_by_run', 'receipts', ['run'], unique=False)
    op.create_index('receipts_by_status', 'receipts', ['status', 'sequence'], unique=False)
    op.create_table('runs',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('run', sa.Text(), nullable=False),
        sa.Column('commit', sa.String(length=40), nullable=False),
        sa.Column('tree', sa.String(length=40), nullable=False),
        sa.Column('repository', sa.Text(), nullable=False),
        sa.Column('reference', sa.Text(), nullable=True),
        sa.Column('pull_request', sa.Integer(), nullable=True),
        sa.Column('dirty', sa.Boolean(), nullable=False),
        sa.Column('ground', sa.Text(), nullable=False),
        sa.Column('policy', sa.Text(), nullable=False),
        sa.Column('policy_sha256', sa.String(length=64), nullable=False),
        sa.Column('rules_sha256', sa.String(length=64), nullable=False),
        sa.Column('started_at', sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint('sequence'),
        sa.UniqueConstraint('run')
    )
    op.create_index('runs_by_commit', 'runs', ['commit'], unique=False)
    op.create_index('runs_by_policy', 'runs', ['policy_sha256'], unique=False)
    op.create_index('runs_by_pull_request', 'runs', ['pull_request'], unique=False)
    op.create_index('runs_by_start', 'runs', ['started_at'], unique=False)
    op.create_table('tombstones',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('position', sa.Integer(), autoincrement=False, nullable=False),
        sa.Column('sha256', sa.String(length=64), nullable=False),
        sa.Column('reason', sa.Text(), nullable=False),
        sa.Column('removed_at', sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint('sequence', 'position')
    )
    op.create_index('tombstones_by_digest', 'tombstones', ['sha256'], unique=False)
    op.create_table('workload_results',
        sa.Column('sequence', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=False, nullable=False),
        sa.Column('run', sa.Text(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('workload', sa.Text(), nullable=False),
        sa.Column('commit', sa.String(length=40), nullable=False),
        sa.Column('ground', sa.Text(), nullable=False),
        sa.Column('card', sa.Text(), nullable=True),
        sa.Column('policy', sa.Text(), nullable=False),
        sa.Column('policy_sha256', sa.String(length=64), nullable=False),
        sa.Column('rules_sha256', sa.String(length=64), nullable=False),
        sa.Column('environment_sha256', sa.String(length=64), nullable=False),
        sa.Column('verdict', sa.Text(), nullable=False),
        sa.Column('started_at', sa.Text(), nullable=False),
        sa.Column('duration_ms', sa.BigInteger(), nullable=False),
        sa.Column('exit_code', sa.Integer(), nullable=True),
        sa.Column('reason', sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint('sequence')
    )
    op.create_index('workload_results_by_card', 'workload_results', ['card', 'sequence'], unique=False)
    op.create_index('workload_results_by_commit', 'workload_results', ['commit'], unique=False)
    op.create_index('workload_results_by_run', 'workload_results', ['run'], unique=False)
    op.create_index('workload_results_by_start', 'workload_results', ['started_at'], unique=False)
    op.create_index('workload_results_by_verdict', 'workload_results', ['verdict', 'sequence'], unique=False)
    op.create_index('workload_results_by_workload', 'workload_results', ['workload', 'policy_sha256', 'sequence'], unique=False)
    ledger = str(uuid4())
    op.execute(
        sa.text("INSERT INTO ledger_identity (singleton, ledger, genesis_hash) VALUES (1, :ledger, :genesis)")
        .bindparams(ledger=ledger, genesis=genesis_hash(ledger))
    )
    protections.create(op.get_bind())


def downgrade() -> None:
    if op.get_bind().exec_driver_sql("SELECT count(*) FROM ledger").scalar_one():
        raise QualificationError("schema 0001 holds the ledger, which is not empty; evidence is never migrated away")
    protections.drop(op.get_bind())
    op.drop_table('workload_results')
    op.drop_table('tombstones')
    op.drop_table('runs')
    op.drop_table('receipts')
    op.drop_table('permissions')
    op.drop_table('ledger_identity')
    op.drop_table('ledger')
    op.drop_table('device_uses')
    op.drop_table('decisions')
    op.drop_table('decision_reasons')
    op.drop_table('criteria')
    op.drop_table('artifacts')
    op.drop_table('approvals')
