"""From recorded facts to the gate's inputs: what the rules declare is looked for, and what is not there is said."""

import msgspec
import pytest

from qualification.approvals import Weighed
from qualification.gate import Age, GateInputs, Head, Source, decide
from qualification.records import (
    Basis,
    Criterion,
    Decision,
    Ground,
    Lease,
    Policy,
    Probe,
    ProbeStatus,
    Receipt,
    ReceiptStatus,
    Subject,
    Verdict,
    WorkloadResult,
)
from qualification.rules import parse_rules
from qualification.standing import RunEvidence, Verified, assemble, matter, source_standing

NOW = "2026-11-30T12:00:00Z"
RULES = parse_rules(
    b"""
format = 1
name = "test"
description = "one workload, two criteria, two platforms"
[freshness]
days = 14
[approvals]
people = 1
valid_days = 7
[[workloads]]
name = "full_step"
ground = "native"
[[workloads.criteria]]
name = "backwards"
direction = "equal"
value = 18
unit = "backwards"
shortfall = "INCOMPLETE"
[[workloads.criteria]]
name = "speed"
direction = "at_least"
value = "0.97"
unit = "ratio"
plausible_to = 4
[probes]
process = ["processes", "nvml"]
docker = ["processes", "containers"]
""",
    "test",
    {"full_step"},
)
SOURCE = Subject(
    repository="example.org/training",
    commit="c" * 40,
    tree="d" * 40,
    dirty=False,
    files={"trainer_rank/__init__.py": "a" * 64},
    manifest_sha256="b" * 64,
    authors=("author@example.org",),
)
CRITERIA = (
    Criterion(name="backwards", verdict=Verdict.PASSED, basis=Basis.RECOMPUTED, measured=18, unit="backwards"),
    Criterion(name="speed", verdict=Verdict.PASSED, basis=Basis.MEASURED, measured="1.02", unit="ratio"),
)
RESULT = WorkloadResult(
    run="run-1",
    attempt=1,
    workload="full_step",
    ground=Ground.NATIVE,
    policy=Policy(name="forecast", sha256="1" * 64),
    rules_sha256=RULES.sha256,
    verdict=Verdict.PASSED,
    criteria=CRITERIA,
    artifacts=(),
    leases=(Lease(resource="gpu-0", token=1),),
    environment_sha256="2" * 64,
    started_at="2026-11-30T11:00:00Z",
    duration_ms=1000,
    exit_code=0,
    requested_by="requester",
)


def probe(name: str, status: ProbeStatus = ProbeStatus.CLEAN) -> Probe:
    return Probe(name=name, source="/proc", status=status, duration_ms=1)


RECEIPT = Receipt(
    run="run-1",
    attempt=1,
    status=ReceiptStatus.CLEAN,
    swept=(),
    leftovers=(),
    probes=(probe("processes"), probe("nvml")),
    leases=RESULT.leases,
    exit_code=0,
    timed_out=False,
    taken_at="2026-11-30T11:01:00Z",
    provider="process",
)
EVIDENCE = RunEvidence(
    run="run-1",
    commits=("c" * 40,),
    sources=(SOURCE,),
    results=(RESULT,),
    receipts=(RECEIPT,),
    evidence_root="e" * 64,
    last_sequence=2,
)
VERIFIED = Verified(problems=(), size=2, root="9" * 64, covered_size=2)


def inputs(evidence: RunEvidence = EVIDENCE, verified: Verified | None = VERIFIED) -> GateInputs:
    approved = Weighed(approved_by=("Ada",))
    return assemble(evidence, RULES, verified, approved, head=Head.FIXED, superseded_by=None, now=NOW)


def with_result(**changed: object) -> RunEvidence:
    return msgspec.structs.replace(EVIDENCE, results=(msgspec.structs.replace(RESULT, **changed),))


def with_criterion(index: int, **changed: object) -> RunEvidence:
    listed = list(CRITERIA)
    listed[index] = msgspec.structs.replace(listed[index], **changed)
    return with_result(criteria=tuple(listed))


def with_receipt(**changed: object) -> RunEvidence:
    return msgspec.structs.replace(EVIDENCE, receipts=(msgspec.structs.replace(RECEIPT, **changed),))


def test_good_evidence_adopts() -> None:
    assert decide(inputs()).decision is Decision.ADOPTED


@pytest.mark.parametrize(
    ("evidence", "row", "reason"),
    [
        (with_result(workload="pressure"), "incomplete", "full_step on native has no result"),
        (with_result(criteria=()), "incomplete", "backwards is missing; speed is missing; it has no criteria"),
        (with_result(criteria=CRITERIA[:1]), "incomplete", "speed is missing"),
        (with_result(criteria=(*CRITERIA, CRITERIA[0])), "incomplete", "backwards is given twice"),
        (with_criterion(0, measured=0), "incomplete", "backwards is 0 backwards, must be equal 18"),
        (with_criterion(1, measured=40), "inconclusive", "speed is 40 ratio, which is not plausible (at most 4)"),
        (with_criterion(1, measured="NaN"), "incomplete", "speed is no decimal figure: 'NaN'"),
        (with_criterion(1, measured=None), "incomplete", "speed was not measured"),
        (with_criterion(1, unit="percent"), "incomplete", "speed is in percent, the rules ask for ratio"),
        (with_criterion(1, basis=Basis.CLAIMED), "incomplete", "speed rests on the worker's word"),
        (with_criterion(1, measured="0.5"), "workload_failed", "speed is 0.5 ratio, must be at least 0.97"),
        (with_criterion(1, verdict=Verdict.INCONCLUSIVE, reason="3 pairs"), "inconclusive", "3 pairs"),
        (with_result(verdict=Verdict.INCOMPLETE, reason="the worker died"), "incomplete", "the worker died"),
        (
            with_result(parameters={"updates": 1, "longest": 24}),
            "incomplete",
            "it ran with longest=24, updates=1, the rules ask for no parameters",
        ),
        (with_result(ground=Ground.REHEARSAL), "rehearsal", "full_step is rehearsal evidence, native is required"),
        (with_result(started_at="2026-11-16T11:59:59Z"), "stale", "older than the rules allow"),
        (with_result(started_at="2026-11-30T12:05:01Z"), "stale", "of unknown age"),
        (with_receipt(status=ReceiptStatus.DIRTY, reason="pid 7 is alive"), "unclean", "is DIRTY (pid 7 is alive)"),
        (with_receipt(probes=(probe("processes"),)), "unclean", "is UNVERIFIED (required probe nvml is absent)"),
        (
            with_receipt(probes=(probe("processes"), probe("nvml", ProbeStatus.NOT_APPLICABLE))),
            "unclean",
            "required probe nvml is not_applicable",
        ),
        (
            with_receipt(probes=(*RECEIPT.probes, probe("nvml", ProbeStatus.UNREADABLE))),
            "unclean",
            "required probe nvml is clean, unreadable",
        ),
        (with_receipt(provider="docker"), "unclean", "required probe containers is absent"),
        (with_receipt(provider=None), "unclean", "the rules name no probes for provider unknown"),
        (msgspec.structs.replace(EVIDENCE, receipts=()), "unclean", "receipt of attempt 1 is absent"),
        (msgspec.structs.replace(EVIDENCE, results=()), "incomplete", "full_step on native has no result"),
        (msgspec.structs.replace(EVIDENCE, sources=()), "inexact_source", "unknown"),
        (
            msgspec.structs.replace(EVIDENCE, sources=(msgspec.structs.replace(SOURCE, dirty=True),)),
            "inexact_source",
            "the executed source is dirty",
        ),
        (msgspec.structs.replace(EVIDENCE, commits=("c" * 40, "d" * 40)), "inexact_source", "unknown"),
        (msgspec.structs.replace(EVIDENCE, last_sequence=3), "unverified", "no signed tree head covers"),
    ],
)
def test_what_is_missing_or_odd_holds_or_rejects_and_is_named(evidence: RunEvidence, row: str, reason: str) -> None:
    ruling = decide(inputs(evidence))
    assert ruling.row == row
    assert any(reason in said for said in ruling.reasons), ruling.reasons


@pytest.mark.parametrize(
    ("verified", "row"),
    [
        (None, "unverified"),
        (msgspec.structs.replace(VERIFIED, covered_size=None), "unverified"),
        (msgspec.structs.replace(VERIFIED, problems=("sequence 1 does not hash",)), "tampered"),
    ],
)
def test_evidence_that_was_not_verified_cannot_adopt(verified: Verified | None, row: str) -> None:
    assert decide(inputs(verified=verified)).row == row


def attempts(*verdicts: Verdict) -> RunEvidence:
    results = tuple(
        msgspec.structs.replace(RESULT, attempt=number, verdict=verdict) for number, verdict in enumerate(verdicts, 1)
    )
    proofs = tuple(msgspec.structs.replace(RECEIPT, attempt=number) for number in range(1, len(verdicts) + 1))
    return msgspec.structs.replace(EVIDENCE, results=results, receipts=proofs)


def test_a_failed_attempt_stays_failed_and_otherwise_the_last_attempt_counts() -> None:
    passed, failed, incomplete = Verdict.PASSED, Verdict.FAILED, Verdict.INCOMPLETE
    assert decide(inputs(attempts(failed, passed))).row == "workload_failed"
    assert decide(inputs(attempts(incomplete, passed))).decision is Decision.ADOPTED
    assert decide(inputs(attempts(passed, incomplete))).row == "incomplete"


def test_every_attempt_needs_its_receipt_and_the_worst_receipt_of_an_attempt_counts() -> None:
    two = attempts(Verdict.INCOMPLETE, Verdict.PASSED)
    only_last = msgspec.structs.replace(two, receipts=two.receipts[1:])
    assert decide(inputs(only_last)).reasons == ("receipt of attempt 1 is absent",)
    dirty = msgspec.structs.replace(RECEIPT, status=ReceiptStatus.DIRTY)
    for order in ((dirty, RECEIPT), (RECEIPT, dirty)):
        assert decide(inputs(msgspec.structs.replace(EVIDENCE, receipts=order))).row == "unclean"


def test_a_failed_rehearsal_rejects_and_a_passed_one_holds_without_asking_for_probes() -> None:
    bare = msgspec.structs.replace(RECEIPT, probes=(), provider=None)
    rehearsal = msgspec.structs.replace(with_result(ground=Ground.REHEARSAL), receipts=(bare,))
    assert decide(inputs(rehearsal)).reasons == ("full_step is rehearsal evidence, native is required",)
    failed = with_result(ground=Ground.REHEARSAL, verdict=Verdict.FAILED, reason="step 2 ran out of memory")
    ruling = decide(inputs(failed))
    assert (ruling.row, ruling.reasons) == ("workload_failed", ("full_step FAILED (step 2 ran out of memory)",))


def test_a_rehearsal_that_is_incomplete_and_a_run_that_judged_nothing_say_their_one_reason() -> None:
    lacking = with_result(ground=Ground.REHEARSAL, verdict=Verdict.INCOMPLETE, criteria=(), reason="no such card")
    (reason,) = decide(inputs(lacking)).reasons
    assert reason == "full_step is rehearsal evidence, native is required, and it is INCOMPLETE (no such card)"
    unusable = with_result(verdict=Verdict.INCOMPLETE, criteria=(), reason="it needs a virtual card")
    (reason,) = decide(inputs(unusable)).reasons
    assert reason == "full_step on native is INCOMPLETE (it needs a virtual card)"


def test_a_requester_that_one_result_lacks_is_unknown() -> None:
    two = attempts(Verdict.PASSED, Verdict.PASSED)
    assert matter(two, RULES).requested_by == ("requester",)
    unknown = (two.results[0], msgspec.structs.replace(two.results[1], requested_by=None))
    assert matter(msgspec.structs.replace(two, results=unknown), RULES).requested_by == ()


def test_a_source_without_files_is_no_exact_source() -> None:
    bare = msgspec.structs.replace(EVIDENCE, sources=(msgspec.structs.replace(SOURCE, files={}),))
    assert source_standing(bare) is Source.UNKNOWN
    assert source_standing(EVIDENCE) is Source.EXACT
    assert inputs().workloads[0].age is Age.FRESH
