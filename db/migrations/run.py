"""Run the schema's migrations with Alembic, from wherever the package is installed."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


def configuration(connection: Connection | None = None) -> Config:
    """Return Alembic's configuration for the migrations beside this file."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config


def migrate(connection: Connection, revision: str) -> None:
    """Bring the schema of the connection's database up or down to ``revision``; the caller commits."""
    config = configuration(connection)
    script = ScriptDirectory.from_config(config)
    target = script.get_current_head() if revision == "head" else revision
    if target == "base" or _is_before(script, target, _present(connection)):
        command.downgrade(config, str(target))
    else:
        command.upgrade(config, str(target))


def _present(connection: Connection) -> str | None:
    from alembic.runtime.migration import MigrationContext

    return MigrationContext.configure(connection).get_current_revision()


def _is_before(script: ScriptDirectory, target: str | None, present: str | None) -> bool:
    order = [one.revision for one in script.walk_revisions()]  # newest first
    return present in order and target in order and order.index(target) > order.index(present)
