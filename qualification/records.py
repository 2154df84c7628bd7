"""The facts of a qualification run as immutable records. Bytes are integers, stamps UTC, durations milliseconds.

No record holds a float: measured values are integers or decimal strings, so that their canonical bytes are unique.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

_STAMP = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z(?!\n)$"

# "$" alone would also match before a newline at the end.
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]
Commit = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{40}(?!\n)$")]
Stamp = Annotated[str, msgspec.Meta(pattern=_STAMP)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Figure = int | str | None
"""A measured value: integer, decimal string, or None where it was not measured."""


class Verdict(StrEnum):
    """What a workload showed."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    INCONCLUSIVE = "INCONCLUSIVE"
    INCOMPLETE = "INCOMPLETE"


class ReceiptStatus(StrEnum):
    """What the cleanup check showed."""

    CLEAN = "CLEAN"
    DIRTY = "DIRTY"
    UNVERIFIED = "UNVERIFIED"


class ProbeStatus(StrEnum):
    """What one cleanup probe showed."""

    CLEAN = "clean"
    LEFTOVER = "leftover"
    UNREADABLE = "unreadable"
    NOT_APPLICABLE = "not_applicable"


class Decision(StrEnum):
    """What the gate answers."""

    ADOPTED = "adopted"
    HELD = "held"
    REJECTED = "rejected"


class Ground(StrEnum):
    """Where a run executed: real GPUs, or the virtual device."""

    NATIVE = "native"
    REHEARSAL = "rehearsal"


class Basis(StrEnum):
    """What a criterion's figure rests on; only the first two can adopt."""

    MEASURED = "measured"
    RECOMPUTED = "recomputed"
    CLAIMED = "claimed"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records."""


class Subject(Record, frozen=True):
    """The exact source that a run qualifies. ``files`` maps each file of trainer_rank to its SHA-256.

    ``authors`` are the e-mail addresses that git names as author and committer of the commit; empty means unknown.
    """

    repository: str
    commit: Commit
    tree: Commit
    dirty: bool
    files: dict[str, Sha256]
    manifest_sha256: Sha256
    reference: str | None = None
    authors: tuple[str, ...] = ()


class Policy(Record, frozen=True):
    """The admission and release settings in force, by name and digest of the document."""

    name: str
    sha256: Sha256


class Artifact(Record, frozen=True):
    """A hashed file of a run. A private one never leaves; ``projection_of`` names the original it was made from."""

    name: str
    sha256: Sha256
    size: Count
    media_type: str
    private: bool = False
    projection_of: Sha256 | None = None


class Criterion(Record, frozen=True):
    """One judged figure. ``direction`` is ``at_most``, ``at_least`` or ``equal`` against ``threshold``."""

    name: str
    verdict: Verdict
    basis: Basis
    measured: Figure = None
    threshold: Figure = None
    direction: str | None = None
    unit: str | None = None
    reason: str | None = None


class Lease(Record, frozen=True):
    """The right to use one device: its identity and the fencing token in force."""

    resource: str
    token: Count


class WorkloadResult(Record, frozen=True):
    """What one workload of a run showed. ``requested_by`` names who asked for the run; None means unknown.

    ``parameters`` are those that were given, not the workload's defaults. ``card`` is the GPUs' name as NVML gives it,
    or ``virtual``.
    """

    run: str
    attempt: Count
    workload: str
    ground: Ground
    policy: Policy
    rules_sha256: Sha256
    verdict: Verdict
    criteria: tuple[Criterion, ...]
    artifacts: tuple[Artifact, ...]
    leases: tuple[Lease, ...]
    environment_sha256: Sha256
    started_at: Stamp
    duration_ms: Count
    exit_code: int | None
    reason: str | None = None
    parameters: dict[str, Figure] = {}
    requested_by: str | None = None
    card: str | None = None


class Process(Record, frozen=True):
    """A process by identity, never by name. ``state``: running, zombie, uninterruptible or foreign."""

    pid: Count
    start_ticks: Count
    boot_id: str
    state: str
    command: str
    parent: Count | None = None


class Probe(Record, frozen=True):
    """One cleanup probe: where it looked, what it read, and how long that took."""

    name: str
    source: str
    status: ProbeStatus
    duration_ms: Count
    values: dict[str, Figure | bool | tuple[str, ...]] = {}
    reason: str | None = None


class Receipt(Record, frozen=True):
    """Proof of cleanup after a run, computed by trusted code on the host after the sweep.

    ``provider`` says where the processes lived (process, docker, kubernetes); None means unknown.
    """

    run: str
    attempt: Count
    status: ReceiptStatus
    swept: tuple[Process, ...]
    leftovers: tuple[Process, ...]
    probes: tuple[Probe, ...]
    leases: tuple[Lease, ...]
    exit_code: int | None
    timed_out: bool
    taken_at: Stamp
    recovered: bool = False
    reason: str | None = None
    provider: str | None = None


class Approval(Record, frozen=True):
    """A named person's signed word on exactly one commit, evidence root and rules digest.

    ``action``: ``approve``, ``reject``, ``hold``, or ``permit`` (the permission to run a head, which has no root yet).
    """

    action: str
    person: str
    role: str
    commit: Commit
    policy: str
    evidence_root: Sha256 | None
    rules_sha256: Sha256 | None
    signed_at: Stamp
    expires_at: Stamp
    note: str | None = None


class AdoptionDecision(Record, frozen=True):
    """What the gate answered for a run, which row of the truth table applied, and every input it looked at."""

    run: str
    decision: Decision
    row: str
    reasons: tuple[str, ...]
    evidence_root: Sha256
    rules_sha256: Sha256
    ledger_size: Count
    ledger_root: Sha256
    decided_at: Stamp
    inputs: dict[str, Figure | bool | tuple[str, ...]] = {}


class TreeHead(Record, frozen=True):
    """The ledger's size and root at one moment; signed, and kept apart from the ledger."""

    ledger: str
    size: Count
    root: Sha256
    signed_at: Stamp


class Tombstone(Record, frozen=True):
    """Blobs that were removed on purpose, why and when; what they showed stays recorded by their digests."""

    blobs: tuple[Sha256, ...]
    reason: str
    removed_at: Stamp


class Publication(Record, frozen=True):
    """Whether a run's decision was shown as a commit status, on which commit and how, or why it was not.

    ``state`` is ``success``, ``failure``, ``pending`` or ``error``, as the host of the repository knows it.
    """

    run: str
    commit: Commit
    context: str
    state: str
    description: str
    published: bool
    published_at: Stamp
    reason: str | None = None
