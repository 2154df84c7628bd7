"""``qualify hold``: a named person's signed word against adoption, whatever evidence comes later."""

from __future__ import annotations

from flows.cli.approve import DaysOption, KeyOption, NoteOption, PassphraseOption, RunName, speak
from qualification.approvals import Action


def command(
    run: RunName = None,
    key: KeyOption = None,
    days: DaysOption = None,
    note: NoteOption = None,
    passphrase: PassphraseOption = False,
) -> int:
    """Sign that a run's commit and policy shall wait: the gate answers held until you approve.

    \b
    You must be an approver in $QUALIFY_TRUST/people.toml. Without --days it counts until you withdraw it.
    Exit code: 0 signed and recorded, 7 not permitted, 5 the evidence does not verify.

    \b
    Example:
      qualify hold 20261130-2201 --note "waits for the two-GPU run"
    """
    return speak(Action.HOLD, run, key, days, note, passphrase=passphrase)
