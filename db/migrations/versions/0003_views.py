"""Documented SQL views over the projections."""

from alembic import op

from db import views

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    views.create(op.get_bind())


def downgrade() -> None:
    views.drop(op.get_bind())
