"""What the queries answer with: one typed line per kind of fact, in the words and units of the records."""

from __future__ import annotations

import msgspec

from qualification.records import Figure


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs to list; every field given narrows. ``since`` and ``until`` are UTC stamps of a run's start.

    ``policy`` is a name or the 64 hex digits of its document; ``before`` continues a list below a run's ``sequence``.
    """

    commit: str | None = None
    pull_request: int | None = None
    policy: str | None = None
    ground: str | None = None
    since: str | None = None
    until: str | None = None
    workload: str | None = None
    verdict: str | None = None
    card: str | None = None
    artifact: str | None = None
    before: int | None = None


class ResultLine(msgspec.Struct, frozen=True):
    """One workload result without its figures."""

    sequence: int
    run: str
    attempt: int
    workload: str
    commit: str
    ground: str
    card: str | None
    policy: str
    policy_sha256: str
    verdict: str
    started_at: str
    duration_ms: int
    exit_code: int | None
    reason: str | None


class ReceiptLine(msgspec.Struct, frozen=True):
    """One cleanup receipt without its probes."""

    sequence: int
    run: str
    attempt: int
    status: str
    exit_code: int | None
    timed_out: bool
    recovered: bool
    taken_at: str
    reason: str | None


class DecisionLine(msgspec.Struct, frozen=True):
    """One recorded decision of the gate, with the row that applied and the reasons in words."""

    sequence: int
    run: str
    commit: str
    decision: str
    row: str
    evidence_root: str
    rules_sha256: str
    ledger_size: int
    decided_at: str
    reasons: tuple[str, ...] = ()


class RunLine(msgspec.Struct, frozen=True):
    """One run, and what was recorded of it. ``sequence`` is that of its first ledger entry."""

    sequence: int
    run: str
    commit: str
    tree: str
    repository: str
    reference: str | None
    pull_request: int | None
    dirty: bool
    ground: str
    policy: str
    policy_sha256: str
    rules_sha256: str
    started_at: str
    results: tuple[ResultLine, ...] = ()
    receipts: tuple[ReceiptLine, ...] = ()
    decision: DecisionLine | None = None


class CriterionLine(msgspec.Struct, frozen=True):
    """One judged figure of a result; figures are decimal text in ``unit``."""

    name: str
    verdict: str
    basis: str
    measured: str | None
    threshold: str | None
    direction: str | None
    unit: str | None
    reason: str | None


class ArtifactLine(msgspec.Struct, frozen=True):
    """One hashed file of a result."""

    name: str
    sha256: str
    size: int
    media_type: str
    private: bool
    projection_of: str | None


class MetricPoint(msgspec.Struct, frozen=True):
    """One figure of one run: a point of a trend over commits."""

    sequence: int
    run: str
    commit: str
    started_at: str
    workload: str
    ground: str
    policy: str
    measured: str | None
    unit: str | None
    threshold: str | None
    verdict: str


class DeviceUse(msgspec.Struct, frozen=True):
    """A lease that a recorded result or receipt names: what ran on a device, and since when it was recorded."""

    sequence: int
    run: str
    resource: str
    token: int
    at: str


class WordLine(msgspec.Struct, frozen=True):
    """One signed word of a person: approve, reject or hold."""

    sequence: int
    action: str
    person: str
    role: str
    commit: str
    policy: str
    evidence_root: str | None
    rules_sha256: str | None
    signed_at: str
    expires_at: str
    note: str | None


class ResultDetail(msgspec.Struct, frozen=True):
    """One result with its judged figures and artifacts, and the parameters given; None where they cannot be read."""

    result: ResultLine
    criteria: tuple[CriterionLine, ...]
    artifacts: tuple[ArtifactLine, ...]
    parameters: dict[str, Figure] | None = None

    @property
    def given(self) -> str:
        """Return the parameters in words, for example ``updates=1``."""
        if self.parameters is None:
            return "unreadable"
        return ", ".join(f"{name}={value}" for name, value in sorted(self.parameters.items())) or "none given"


class RunDetail(msgspec.Struct, frozen=True):
    """Everything recorded of one run, and people's words on its commit; decisions and words newest first."""

    run: RunLine
    results: tuple[ResultDetail, ...]
    decisions: tuple[DecisionLine, ...]
    words: tuple[WordLine, ...]


class Difference(msgspec.Struct, frozen=True):
    """One thing in which two runs differ; None where a run does not have it."""

    what: str
    first: str | None
    second: str | None
