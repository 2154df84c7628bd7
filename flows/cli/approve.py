"""``qualify approve``: a named person signs a word on exactly one commit, its evidence and the gate rules."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from getpass import getpass
from pathlib import Path
from typing import Annotated

import typer
from securesystemslib.signer import CryptoSigner

from db.deciding import Case, examine
from db.engine import open_for_reading, open_for_writing
from db.ledger import Ledger
from flows.cli.exits import ExitCode
from qualification.approvals import NEVER, Action, involvement, refusal
from qualification.errors import ConfigurationError, NotPermittedError, TamperedError
from qualification.evidence.blobs import BlobStore
from qualification.evidence.signing import pipeline_signer, read_signer, sign, utc_now
from qualification.evidence.statements import statement
from qualification.evidence.trust import PEOPLE_FILE, KeyUse, Trust, load_people
from qualification.home import home, trust
from qualification.records import Approval, Decision
from qualification.reporting.gate import explanation
from qualification.standing import matter

RunName = Annotated[str | None, typer.Argument(help="A run, or a start of its name. Default: the newest.")]
KeyOption = Annotated[
    Path | None, typer.Option("--key", help="Your Ed25519 private key, PEM or OpenSSH. Default: ~/.ssh/id_ed25519.")
]
PassphraseOption = Annotated[bool, typer.Option("--passphrase", help="Ask for the key's passphrase.")]
NoteOption = Annotated[str | None, typer.Option("--note", help="Why, in your own words; signed too.")]
DaysOption = Annotated[int | None, typer.Option("--days", min=1, help="For how many days it counts.")]

_SHOWN = "%Y-%m-%dT%H:%M:%SZ"


def command(
    run: RunName = None,
    key: KeyOption = None,
    days: DaysOption = None,
    note: NoteOption = None,
    passphrase: PassphraseOption = False,
) -> int:
    """Sign your approval of a run: its commit, its evidence and the gate rules it was made under, for 7 days.

    \b
    You must be an approver in $QUALIFY_TRUST/people.toml, and neither have written the commit nor asked for the run.
    Exit code: 0 signed and recorded, 7 not permitted, 5 the evidence does not verify.

    \b
    Examples:
      qualify approve
      qualify approve 20261130-2201 --key ~/.ssh/id_ed25519 --note "read the memory plots"
    """
    return speak(Action.APPROVE, run, key, days, note, passphrase=passphrase)


def speak(
    action: Action, run: str | None, key: Path | None, days: int | None, note: str | None, *, passphrase: bool
) -> int:
    """Sign one word on a run with a person's key, record it, and say what the gate answers now."""
    case = _examine(run)
    if case.verification.first is not None:
        raise TamperedError(f"nothing is signed over evidence that does not verify: {case.verification.first}")
    signer = signer_of(key, ask=passphrase)
    name, role = permitted_person(signer, action)
    about = matter(case.evidence, case.document)
    if action is Action.APPROVE and (why := involvement(name, load_people(trust()), about)):
        raise NotPermittedError(f"{name} may not approve run {case.run.run}: {why}")
    record(
        Approval(
            action=action.value,
            person=name,
            role=role,
            commit=about.commit,
            policy=about.policy,
            evidence_root=about.evidence_root,
            rules_sha256=about.rules_sha256,
            signed_at=(now := utc_now()),
            expires_at=_expiry(now, action, days, about.valid_days),
            note=note,
        ),
        signer,
    )
    after = _examine(case.run.run)
    typer.echo(explanation(after.inputs, after.ruling, full=False))
    if after.ruling.decision is Decision.ADOPTED:
        typer.echo(f"next: qualify gate check --record {case.run.run}")
    return ExitCode.PASSED


def signer_of(key: Path | None, *, ask: bool) -> CryptoSigner:
    """Read a person's private key; ``ask`` for its passphrase on the terminal."""
    path = key or Path("~/.ssh/id_ed25519").expanduser()
    if not path.exists():
        raise ConfigurationError(
            f"{path}: there is no such private key; give --key FILE, the key of a person in {trust() / PEOPLE_FILE}"
        )
    return read_signer(path, getpass(f"passphrase of {path}: ").encode() if ask else None)


def permitted_person(signer: CryptoSigner, action: Action) -> tuple[str, str]:
    """Return the name and roles of the person whose key this is; refuse who may not do ``action``."""
    known = Trust.load(trust()).keys.get(signer.public_key.keyid)
    if known is None or known.use is not KeyUse.PERSON:
        raise NotPermittedError(
            f"to {action.value} takes a permitted person's key; this one is nobody's in people.toml; "
            f"give another with --key, or have its owner added to {trust() / PEOPLE_FILE}"
        )
    people = load_people(trust())
    if why := refusal(known.owner, people, action, utc_now()):
        raise NotPermittedError(why)
    return known.owner, ", ".join(people[known.owner].roles)


def record(word: Approval, signer: CryptoSigner) -> None:
    """Append a person's signed word to the ledger, and sign its new tree head."""
    engine = open_for_writing()
    try:
        ledger = Ledger(engine, BlobStore(home()), trust(), pipeline_signer(trust()))
        entry = ledger.append(sign(statement(word), signer))
        ledger.sign_head()
    finally:
        engine.dispose()
    typer.echo(
        f"qualify: {word.action} of {word.person} on {word.commit} recorded at sequence {entry.sequence}, "
        f"{'until withdrawn' if word.expires_at == NEVER else f'expires {word.expires_at}'}",
        err=True,
    )


def later(now: str, days: int) -> str:
    """Return the stamp this many days after ``now``."""
    return (datetime.fromisoformat(now).astimezone(UTC) + timedelta(days=days)).strftime(_SHOWN)


def _expiry(now: str, action: Action, days: int | None, valid_days: int) -> str:
    if action is not Action.APPROVE:
        return NEVER if days is None else later(now, days)
    if days is not None and days > valid_days:
        raise ConfigurationError(f"--days {days}: the gate rules let an approval count for {valid_days} days at most")
    return later(now, days or valid_days)


def _examine(run: str | None) -> Case:
    engine = open_for_reading()
    try:
        return examine(engine, BlobStore(home()), trust(), run=run)
    finally:
        engine.dispose()
