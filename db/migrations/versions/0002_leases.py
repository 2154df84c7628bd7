"""Leases of devices and their queue."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_OPEN = sa.text("closed_at_ms IS NULL")


def upgrade() -> None:
    op.create_table(
        "lease_devices",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("baseline_bytes", sa.BigInteger()),
        sa.Column("quarantine", sa.Text()),
    )
    op.create_table(
        "lease_queue",
        sa.Column("ticket", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "leases",
        sa.Column("id", _NUMBER, primary_key=True, autoincrement=True),
        sa.Column("resource", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("acquired_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("closed_at_ms", sa.BigInteger()),
        sa.Column("status", sa.Text()),
        sa.Column("reason", sa.Text()),
        sa.UniqueConstraint("resource", "token"),
    )
    op.create_index(
        "leases_one_open", "leases", ["resource"], unique=True, sqlite_where=_OPEN, postgresql_where=_OPEN
    )


def downgrade() -> None:
    op.drop_index("leases_one_open", table_name="leases")
    op.drop_table("leases")
    op.drop_table("lease_queue")
    op.drop_table("lease_devices")
