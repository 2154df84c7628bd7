"""``qualify permit``: a named person's signed permission to run the code of one exact commit here."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.approve import KeyOption, NoteOption, PassphraseOption, later, permitted_person, record, signer_of
from flows.cli.exits import ExitCode
from qualification.approvals import Action
from qualification.evidence.signing import utc_now
from qualification.git import require_commit
from qualification.records import Approval

DAYS = 7


def command(
    commit: Annotated[str, typer.Argument(help="The commit, all 40 hexadecimal digits.", show_default=False)],
    key: KeyOption = None,
    days: Annotated[int, typer.Option("--days", min=1, max=DAYS, help="For how many days it counts.")] = DAYS,
    note: NoteOption = None,
    passphrase: PassphraseOption = False,
) -> int:
    """Sign the permission to run one commit's code on this machine's devices; a pull request needs it.

    \b
    You must be an operator, approver or admin in $QUALIFY_TRUST/people.toml.
    Exit code: 0 signed and recorded, 7 not permitted.

    \b
    Example:
      qualify permit 0123456789abcdef0123456789abcdef01234567
    """
    require_commit(commit)
    signer = signer_of(key, ask=passphrase)
    name, role = permitted_person(signer, Action.PERMIT)
    now = utc_now()
    record(
        Approval(
            action=Action.PERMIT.value,
            person=name,
            role=role,
            commit=commit,
            policy="",
            evidence_root=None,
            rules_sha256=None,
            signed_at=now,
            expires_at=later(now, days),
            note=note,
        ),
        signer,
    )
    return ExitCode.PASSED
