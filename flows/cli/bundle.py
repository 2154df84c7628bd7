"""``qualify bundle``: bring the evidence of one run to someone else, or take theirs in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from db.bundles import export_bundle, import_bundle
from db.engine import open_for_writing, reading
from db.ledger import Ledger
from db.queries import find_run
from flows.cli.exits import ExitCode
from qualification.errors import ConfigurationError
from qualification.evidence.blobs import BlobStore
from qualification.evidence.bundle import Bundle, read_bundle
from qualification.evidence.bundle_check import BundleVerification, verify_bundle
from qualification.evidence.signing import pipeline_signer
from qualification.evidence.trust import Trust, TrustedKey, accept_public_key
from qualification.home import home, trust

SCHEMA = "qualify.bundle/1"

app = typer.Typer(no_args_is_help=True)

BundleFile = Annotated[Path, typer.Argument(help="The bundle's file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Accept = Annotated[
    list[str] | None,
    typer.Option("--accept", help="Trust this key of the bundle; compare its full id with its owner first."),
]


@app.callback()
def group() -> None:
    """Bring the evidence of one run to someone else, or take theirs in.

    \b
    A bundle is one file. tools/verify_bundle.py verifies it without this program.
    """


@app.command("export")
def export(
    run: Annotated[str, typer.Argument(help="The run, or the unique start of its name.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")] = None,
    as_json: AsJson = False,
) -> int:
    """Write everything recorded of a run into one file. Private blobs stay here, and are listed as withheld.

    \b
    Examples:
      qualify bundle export 20261130T120000Z-4f0c
      qualify bundle export 2026 --output evidence.tar
    """
    ledger = _ledger()
    with reading(ledger.engine) as connection:
        name = find_run(connection, run).run
    path = (output or Path(f"{name}.bundle.tar")).absolute()
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path.parent} is no folder; make it, or name another --output")
    return _say(f"wrote {path}", export_bundle(ledger, name, path), as_json)


@app.command()
def verify(file: BundleFile, accept: Accept = None, as_json: AsJson = False) -> int:
    """Verify a bundle with the keys trusted here.

    \b
    Exit code: 0 when it verifies, 5 with the first thing that does not.

    \b
    Examples:
      qualify bundle verify evidence.tar
    """
    bundle = read_bundle(file)
    known = Trust([*Trust.load(trust()).keys.values(), *_accepted(bundle, accept)])
    return _say(f"{file} verifies", verify_bundle(bundle, known), as_json)


@app.command("import")
def import_(file: BundleFile, accept: Accept = None, as_json: AsJson = False) -> int:
    """Record a bundle's evidence in this database, with its history, as it was signed.

    \b
    Examples:
      qualify bundle import evidence.tar
      qualify bundle import evidence.tar --accept 6a36ae92e4f8...
    """
    bundle = read_bundle(file)
    for key in _accepted(bundle, accept):
        accept_public_key(trust(), key)
    ledger = _ledger()
    done = import_bundle(ledger, bundle, pipeline_signer(trust()))
    text = f"recorded {len(done.entries)} entries of run {bundle.manifest.run}"
    if done.known:
        text += f"; {done.known} were recorded already"
    return _say(text, done.verification, as_json)


def _ledger() -> Ledger:
    return Ledger(open_for_writing(), BlobStore(home()), trust(), pipeline_signer(trust()))


def _accepted(bundle: Bundle, wanted: list[str] | None) -> list[TrustedKey]:
    inside = {key.keyid: key for key in bundle.keys}
    missing = [identity for identity in wanted or () if identity not in inside]
    if missing:
        held = ", ".join(f"{key.keyid} ({key.owner})" for key in bundle.keys)
        raise ConfigurationError(f"the bundle holds no key {missing[0]}; it holds {held}")
    return [inside[identity] for identity in wanted or ()]


def _say(text: str, result: BundleVerification, as_json: bool) -> int:
    if as_json:
        document = {"schema": SCHEMA, "verified": result.verified, "first": result.first}
        typer.echo(msgspec.json.encode({**document, **msgspec.structs.asdict(result)}))
    elif result.verified:
        typer.echo(
            f"{text}: run {result.run}, {result.entries} entries up to tree head {result.head}, "
            f"{result.blobs} blobs, {result.withheld} withheld"
        )
    else:
        for finding in result.findings:
            typer.echo(str(finding))
    if not result.verified:
        print(f"qualify: the bundle does not verify; first at {result.first}", file=sys.stderr)  # noqa: T201
    return ExitCode.PASSED if result.verified else ExitCode.TAMPERED
