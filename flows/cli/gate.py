"""``qualify gate``: may the policy be adopted, why, and what would a past decision be today."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from db.deciding import Case, examine, replay
from db.engine import open_for_reading, reading
from flows.cli.exits import ExitCode, for_decision, strongest
from qualification.evidence.blobs import BlobStore
from qualification.evidence.trust import Trust
from qualification.gate import table, unflatten
from qualification.git import require_commit
from qualification.home import home, trust
from qualification.records import ReceiptStatus
from qualification.reporting.gate import case_document, explanation, rules_table
from qualification.rules import load_rules

app = typer.Typer(no_args_is_help=True)

RunName = Annotated[str | None, typer.Argument(help="A run, or a start of its name. Default: the newest.")]
HeadOption = Annotated[str | None, typer.Option("--head", help="The newest run of this commit (40 hex digits).")]
RulesOption = Annotated[
    str | None, typer.Option("--rules", help="Gate rules by name or .toml file. Default: those the run was made under.")
]
RepositoryOption = Annotated[
    str | None, typer.Option("--repo", help="Where to look whether the commit is still the head of its reference.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.callback()
def group() -> None:
    """Ask whether a policy may be adopted, and why."""


@app.command()
def check(
    run: RunName = None,
    head: HeadOption = None,
    rules: RulesOption = None,
    repository: RepositoryOption = None,
    record: Annotated[bool, typer.Option("--record", help="Sign the answer into the ledger if it is new.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Verify the whole ledger, and answer adopted, held or rejected for a run as things stand now.

    \b
    Exit code: 0 adopted, 3 rejected, 4 held, 5 the evidence does not verify, 6 cleanup was not proved.

    \b
    Examples:
      qualify gate check
      qualify gate check --head 0123456789abcdef0123456789abcdef01234567
      qualify gate check --json | jq -r .decision
    """
    case = _examine(run, head, rules, repository)
    if record:
        _record(case)
    if as_json:
        typer.echo(msgspec.json.encode(case_document(case.inputs, case.ruling)))
    else:
        typer.echo(explanation(case.inputs, case.ruling, full=False))
    return exit_code(case)


@app.command()
def explain(
    run: RunName = None,
    head: HeadOption = None,
    rules: RulesOption = None,
    repository: RepositoryOption = None,
    decision: Annotated[
        int | None, typer.Option("--decision", help="Replay the decision at this sequence of the ledger instead.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Print every input of a decision, every row of the table, and which one applied.

    \b
    With --decision, a past decision is made again from its stored bytes alone and compared.
    Exit code: 0, or 5 when the evidence does not verify or a replay differs.

    \b
    Examples:
      qualify gate explain
      qualify evidence why
      qualify gate explain --decision 12
    """
    if decision is not None:
        return _replay(decision, as_json=as_json)
    case = _examine(run, head, rules, repository)
    if as_json:
        typer.echo(msgspec.json.encode(case_document(case.inputs, case.ruling, table(case.inputs))))
    else:
        typer.echo(explanation(case.inputs, case.ruling, full=True))
    return ExitCode.PASSED if case.verification.verified else ExitCode.TAMPERED


@app.command()
def publish(
    run: RunName = None,
    head: HeadOption = None,
    repository: Annotated[
        str | None, typer.Option("--repository", help="OWNER/NAME on the API. Default: the source's, if on github.com.")
    ] = None,
    address: RepositoryOption = None,
) -> int:
    """Show the decision as a commit status, on exactly the commit that ran, unless it is shown already.

    \b
    QUALIFY_STATUS_TOKEN is the token, QUALIFY_STATUS_API another address than https://api.github.com.
    The ledger records whether it worked. Exit code: 0 published, 1 not published.

    \b
    Example:
      qualify gate publish --repository example/trainer
    """
    from flows.publishing import in_words
    from flows.publishing import publish as publish_case
    from flows.recorder import Recorder

    case = _examine(run, head, None, address)
    recorder = Recorder()
    try:
        outcome = publish_case(case, recorder, repository)
    finally:
        recorder.close()
    typer.echo(in_words(outcome))
    return ExitCode.PASSED if outcome.published else ExitCode.UNEXPECTED


@app.command("table")
def show_table() -> None:
    """Print the gate's table as Markdown, as docs/gate.md holds it."""
    typer.echo(rules_table(), nl=False)


def exit_code(case: Case) -> ExitCode:
    """Return the code of a decision and of the cleanup behind it; the stronger one answers."""
    proofs = [receipt.status for receipt in case.inputs.receipts]
    clean = bool(proofs) and all(status is ReceiptStatus.CLEAN for status in proofs)
    return strongest([for_decision(case.decision()), ExitCode.PASSED if clean else ExitCode.NOT_CLEAN])


def _examine(run: str | None, head: str | None, rules: str | None, repository: str | None) -> Case:
    document = load_rules(rules) if rules else None
    commit = require_commit(head) if head else None
    engine = open_for_reading()
    try:
        return examine(
            engine, BlobStore(home()), trust(), run=run, commit=commit, document=document, address=repository
        )
    finally:
        engine.dispose()


def _record(case: Case) -> None:
    """Append the decision, unless the newest one of the run says the same of the same evidence under the same rules."""
    from flows.recorder import Recorder

    if not case.verification.verified or not case.evidence.sources:
        typer.echo("qualify: not recorded: the evidence does not verify, or names no source", err=True)
        return
    made, newest = case.decision(), case.run.decision
    says = ("decision", "row", "reasons", "evidence_root", "rules_sha256")
    if newest is not None and all(getattr(made, name) == getattr(newest, name) for name in says):
        typer.echo(f"qualify: already recorded at sequence {newest.sequence}", err=True)
        return
    recorder = Recorder()
    try:
        (entry,) = recorder.record([made], case.evidence.sources[0])
        recorder.seal()
    finally:
        recorder.close()
    typer.echo(f"qualify: recorded at sequence {entry.sequence}", err=True)


def _replay(sequence: int, *, as_json: bool) -> int:
    engine = open_for_reading()
    with reading(engine) as connection:
        replayed = replay(connection, sequence, Trust.load(trust()))
    engine.dispose()
    inputs = unflatten(replayed.recorded.inputs)
    if as_json:
        document = case_document(inputs, replayed.ruling, table(inputs))
        typer.echo(msgspec.json.encode({**document, "replay_of": sequence, "differences": replayed.differences}))
    else:
        same = "; ".join(replayed.differences) or "the same decision, row and reasons"
        typer.echo(explanation(inputs, replayed.ruling, full=True))
        typer.echo(f"replayed from the stored bytes of sequence {sequence}: {same}")
    return ExitCode.TAMPERED if replayed.differences else ExitCode.PASSED
