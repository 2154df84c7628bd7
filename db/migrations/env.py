"""Alembic's entry: runs inside the transaction that the caller opened, which holds the write lock."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=False)
context.run_migrations()
