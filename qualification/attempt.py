"""One attempt of a run as it was decided before anything started; written first, so that recovery knows it all.

``attempt.json`` in the attempt's folder outlives a killed pipeline: with it, whoever sweeps can record INCOMPLETE
results and a recovered receipt that name the same subject, policy and rules.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from qualification.errors import ConfigurationError
from qualification.execution.files import write_durably
from qualification.records import Count, Figure, Ground, Policy, Record, Sha256, Stamp, Subject

ATTEMPT_FILE = "attempt.json"


class Attempt(Record, frozen=True):
    """What one attempt shall do, under which token, and what is to be retired after it.

    ``source`` is the folder that holds the subject's ``trainer_rank``. ``worktree`` is set when that folder was made
    for this attempt out of the bare repository ``store``. Results come in the order of ``workloads``.
    """

    run: str
    attempt: Count
    token: str
    started_at: Stamp
    subject: Subject
    policy: Policy
    ground: Ground
    workloads: tuple[str, ...]
    rules_sha256: Sha256
    environment_sha256: Sha256
    source: str
    parameters: dict[str, Figure] = msgspec.field(default_factory=dict)
    requested_by: str | None = None
    worktree: str | None = None
    store: str | None = None
    provider: str = "process"


def save_attempt(attempt: Attempt, folder: Path) -> None:
    """Write the attempt durably into its folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(folder / ATTEMPT_FILE, msgspec.json.encode(attempt))


def load_attempt(folder: Path) -> Attempt | None:
    """Return the attempt of a folder, None when the folder holds none (a command without a subject)."""
    try:
        return msgspec.json.decode((folder / ATTEMPT_FILE).read_bytes(), type=Attempt)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{folder / ATTEMPT_FILE} is no attempt of this version: {error}") from None
