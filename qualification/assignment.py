"""What one attempt shall do, as it was decided before anything started; written first, so that recovery knows it.

``assignment.json`` in the attempt's folder outlives a killed pipeline: with it, whoever sweeps can record INCOMPLETE
results and a recovered receipt that name the same subject, policy and rules.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from qualification.errors import ConfigurationError
from qualification.execution.files import write_durably
from qualification.records import Count, Figure, Ground, Policy, Record, Sha256, Stamp, Subject

ASSIGNMENT_FILE = "assignment.json"


class Assignment(Record, frozen=True):
    """One attempt of a run: which workloads, on which source and ground, under which policy and rules.

    ``source`` is the folder that holds the subject's ``trainer_rank``; when it was checked out for this attempt,
    ``store`` is the bare repository that it came from, and it is to be retired. ``packages`` is the folder of what its
    lock names. ``requested_by`` None means unknown.
    """

    run: str
    attempt: Count
    started_at: Stamp
    subject: Subject
    policy: Policy
    ground: Ground
    workloads: tuple[str, ...]
    rules_sha256: Sha256
    environment_sha256: Sha256
    source: str
    store: str | None = None
    packages: str | None = None
    parameters: dict[str, Figure] = msgspec.field(default_factory=dict)
    requested_by: str | None = None


def save_assignment(assignment: Assignment, folder: Path) -> None:
    """Write the assignment durably into the attempt's folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(folder / ASSIGNMENT_FILE, msgspec.json.encode(assignment))


def load_assignment(folder: Path) -> Assignment | None:
    """Return the assignment of an attempt's folder, None when it has none (a command without a subject)."""
    try:
        return msgspec.json.decode((folder / ASSIGNMENT_FILE).read_bytes(), type=Assignment)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{folder / ASSIGNMENT_FILE} is no assignment of this version: {error}") from None
