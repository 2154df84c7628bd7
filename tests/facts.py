"""Records as a run makes them, small and complete, for tests and benchmarks of evidence."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from qualification.evidence.blobs import BlobStore
from qualification.records import (
    AdoptionDecision,
    Approval,
    Artifact,
    Basis,
    Criterion,
    Decision,
    Ground,
    Lease,
    Policy,
    Probe,
    ProbeStatus,
    Process,
    Receipt,
    ReceiptStatus,
    Subject,
    Verdict,
    WorkloadResult,
)

COMMIT = "4f0c" * 10
DOCUMENT = b'{"document":"policy, rules and environment of the tests"}'
DOCUMENT_SHA256 = sha256(DOCUMENT).hexdigest()
STAMP = "2026-11-30T12:00:00.000000Z"


def subject(commit: str = COMMIT, reference: str | None = "refs/pull/17/head") -> Subject:
    return Subject(
        repository="github.com/example/trainer",
        commit=commit,
        tree="9d" * 20,
        dirty=False,
        files={"trainer_rank/__init__.py": "1a" * 32, "trainer_rank/rank.py": "2b" * 32},
        manifest_sha256="3c" * 32,
        reference=reference,
    )


def artifact(content: bytes, name: str = "steps.json") -> Artifact:
    return Artifact(name=name, sha256=sha256(content).hexdigest(), size=len(content), media_type="application/json")


def result(
    run: str = "run-1",
    *,
    workload: str = "full_step",
    verdict: Verdict = Verdict.PASSED,
    artifacts: Sequence[Artifact] = (),
    started_at: str = STAMP,
) -> WorkloadResult:
    return WorkloadResult(
        run=run,
        attempt=1,
        workload=workload,
        ground=Ground.REHEARSAL,
        policy=Policy(name="forecast", sha256=DOCUMENT_SHA256),
        rules_sha256=DOCUMENT_SHA256,
        verdict=verdict,
        criteria=(
            Criterion(name="backwards", verdict=verdict, basis=Basis.MEASURED, measured=18, threshold=18, unit="count"),
            Criterion(
                name="loss", verdict=Verdict.PASSED, basis=Basis.RECOMPUTED, measured="2.75", direction="at_most"
            ),
        ),
        artifacts=tuple(artifacts),
        leases=(Lease(resource="virtual:h200:0", token=3),),
        environment_sha256=DOCUMENT_SHA256,
        started_at=started_at,
        duration_ms=1234,
        exit_code=0,
        parameters={"updates": 3},
        card="NVIDIA H200",
    )


def receipt(run: str = "run-1", status: ReceiptStatus = ReceiptStatus.CLEAN, *, taken_at: str = STAMP) -> Receipt:
    return Receipt(
        run=run,
        attempt=1,
        status=status,
        swept=(Process(pid=41, start_ticks=7, boot_id="b", state="running", command="sleep 60"),),
        leftovers=(),
        probes=(Probe(name="processes", source="/proc", status=ProbeStatus.CLEAN, duration_ms=3, values={"scans": 2}),),
        leases=(Lease(resource="virtual:h200:0", token=3),),
        exit_code=0,
        timed_out=False,
        taken_at=taken_at,
    )


def decision(run: str = "run-1", root: str = "5e" * 32, answer: Decision = Decision.HELD) -> AdoptionDecision:
    return AdoptionDecision(
        run=run,
        decision=answer,
        row="rehearsal only",
        reasons=("full_step ran on rehearsal, native is required", "nobody approved"),
        evidence_root=root,
        rules_sha256=DOCUMENT_SHA256,
        ledger_size=2,
        ledger_root="6f" * 32,
        decided_at=STAMP,
        inputs={"covered": True, "approved_by": ()},
    )


def approval(person: str = "alice", action: str = "approve", commit: str = COMMIT) -> Approval:
    return Approval(
        action=action,
        person=person,
        role="approver",
        commit=commit,
        policy="forecast",
        evidence_root="5e" * 32,
        rules_sha256=DOCUMENT_SHA256,
        signed_at=STAMP,
        expires_at="2026-12-07T12:00:00.000000Z",
    )


def store_documents(store: BlobStore, *contents: bytes) -> None:
    """Store what every result here rests on, and ``contents``."""
    for content in (DOCUMENT, *contents):
        store.put(content)
