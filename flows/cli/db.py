"""``qualify db``: look after the evidence database."""

from __future__ import annotations

from typing import Annotated

import typer

from db.engine import REVISIONS, open_for_writing, reading, stored_revision, upgrade
from db.ledger import Ledger
from db.ledger import rebuild as rebuild_projections
from db.queries import find_run
from db.retention import remove_private_blobs
from flows.cli.exits import ExitCode
from qualification.errors import ConfigurationError
from qualification.evidence.blobs import BlobStore
from qualification.evidence.signing import pipeline_signer
from qualification.evidence.trust import Trust
from qualification.home import home, trust

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


@app.command("sign-head")
def sign_head(
    first: Annotated[
        bool, typer.Option("--first", help="Take the ledger as it is: this folder of trust is new to it.")
    ] = False,
) -> int:
    """Sign the ledger's tree head as it is now, after checking that it extends the newest one.

    \b
    Examples:
      qualify db sign-head
      qualify db sign-head --first    on a second machine that shares the database
    """
    folder = trust()
    head = Ledger(open_for_writing(), BlobStore(home()), folder, pipeline_signer(folder)).sign_head(first=first)
    typer.echo(f"signed tree head {head.size}, root {head.root}")
    return ExitCode.PASSED


@app.command("remove-private")
def remove_private(
    run: Annotated[str, typer.Argument(help="The run, or the unique start of its name.", show_default=False)],
    reason: Annotated[str, typer.Option(help="Why; it is recorded with the tombstone.", show_default=False)],
) -> int:
    """Remove the private originals of a run for good. A signed tombstone is recorded first; projections stay.

    \b
    Examples:
      qualify db remove-private 20261130T120000Z --reason "kept for 90 days"
    """
    folder = trust()
    signer = pipeline_signer(folder)
    ledger = Ledger(open_for_writing(), BlobStore(home()), folder, signer)
    with reading(ledger.engine) as connection:
        name = find_run(connection, run).run
    removed = remove_private_blobs(ledger, name, reason, signer)
    typer.echo(f"removed {len(removed)} private blobs of run {name}; a tombstone is recorded")
    return ExitCode.PASSED


@app.command()
def migrate(
    to: Annotated[str, typer.Option(help="The schema revision to go to, up or down.")] = REVISIONS[-1],
) -> int:
    """Bring the schema to this program's revision, or to another one that it knows. Evidence is never dropped.

    Query tables are made again from the ledger. Going down forgets who holds a lease; do it when nothing runs.

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
    if to == REVISIONS[-1]:  # a table that went down with the schema comes back empty
        rebuild_projections(engine, Trust.load(trust()))
    typer.echo(f"schema {to}" + ("" if before == to else f", was {before}"))
    return ExitCode.PASSED
