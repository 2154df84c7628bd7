"""``qualify db``: look after the evidence database."""

from __future__ import annotations

from typing import Annotated

import typer

from db.engine import REVISIONS, open_for_writing, stored_revision, upgrade
from db.ledger import rebuild as rebuild_projections
from flows.cli.exits import ExitCode
from qualification.errors import ConfigurationError
from qualification.evidence.trust import Trust
from qualification.home import trust

app = typer.Typer(no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look after the evidence database: its schema and its query tables."""


@app.command()
def rebuild() -> int:
    """Make every query table again from the ledger; the rows come out byte for byte the same.

    \b
    Examples:
      qualify db rebuild
    """
    count = rebuild_projections(open_for_writing(), Trust.load(trust()))
    typer.echo(f"query tables rebuilt from {count} ledger entries")
    return ExitCode.PASSED


@app.command()
def migrate(
    to: Annotated[str, typer.Option(help="The schema revision to go to, up or down.")] = REVISIONS[-1],
) -> int:
    """Bring the schema to this program's revision, or to another one that it knows. Evidence is never dropped.

    \b
    Examples:
      qualify db migrate
      qualify db migrate --to 0002
    """
    if to not in REVISIONS:
        raise ConfigurationError(f"there is no schema revision {to!r}; known are {', '.join(REVISIONS)}")
    engine = open_for_writing()
    before = stored_revision(engine)
    if before != to:
        upgrade(engine, to)
    typer.echo(f"schema {to}" + ("" if before == to else f", was {before}"))
    return ExitCode.PASSED
