"""``qualify verify``: walk everything that was recorded, and say what does not verify."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from db.check import verify_database
from db.engine import open_for_reading
from flows.cli.exits import ExitCode
from qualification.evidence.blobs import BlobStore
from qualification.evidence.findings import Finding, InvalidEvidence
from qualification.evidence.verify import Verification
from qualification.home import home, trust

SCHEMA = "qualify.verify/1"
_SHOWN = 20


def command(
    since_head: Annotated[
        bool, typer.Option("--since-head", help="Check only what follows the newest signed tree head.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Walk every ledger entry, signature, blob, query table, trigger and tree head.

    \b
    Exit code: 0 when all of it verifies, 5 with the first bad sequence otherwise.

    \b
    Examples:
      qualify verify
      qualify verify --since-head
      qualify verify --json | jq .first
    """
    try:
        result = verify_database(open_for_reading(), BlobStore(home()), trust(), since_head=since_head)
    except InvalidEvidence as error:
        if as_json:
            first = Finding(code=error.code, place="evidence", text=error.text)
            typer.echo(msgspec.json.encode({"schema": SCHEMA, "verified": False, "first": first}))
        raise
    if as_json:
        typer.echo(msgspec.json.encode(_document(result)))
    else:
        _print(result)
    return ExitCode.PASSED if result.verified else ExitCode.TAMPERED


def _document(result: Verification) -> dict[str, object]:
    return {"schema": SCHEMA, "verified": result.verified, "first": result.first, **msgspec.structs.asdict(result)}


def _print(result: Verification) -> None:
    covered = "no signed tree head yet" if result.head is None else f"signed tree head at {result.head}"
    if result.verified:
        scope = f"only what follows sequence {result.checked_after}" if result.checked_after else "everything"
        blobs = f"{result.blobs} blob{'s' if result.blobs != 1 else ''}"
        typer.echo(f"verified {scope}: ledger of {result.size} entries, {blobs}, {covered}")
        typer.echo(f"root {result.root}")
        return
    for finding in result.findings[:_SHOWN]:
        typer.echo(str(finding))
    hidden = len(result.findings) - _SHOWN
    if hidden > 0:
        typer.echo(f"... and {hidden} more; --json gives all")
    print(f"qualify: evidence does not verify; first at {result.first}", file=sys.stderr)  # noqa: T201
