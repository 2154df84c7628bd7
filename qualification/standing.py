"""What a run's recorded facts amount to under given rules: the inputs of the gate. Pure; looks nothing up.

The set of results is compared with what the rules declare, never the other way round: an absent result, an absent
figure or an absent probe is an input of its own. Figures are compared with the rules' thresholds again here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Annotated

import msgspec

from qualification.approvals import Matter, Weighed
from qualification.gate import Age, GateInputs, Head, ReceiptStanding, Source, WorkloadStanding
from qualification.records import (
    Basis,
    Commit,
    Count,
    Criterion,
    Figure,
    Ground,
    ProbeStatus,
    Receipt,
    ReceiptStatus,
    Record,
    Sha256,
    Subject,
    Verdict,
    WorkloadResult,
)
from qualification.rules import RequiredWorkload, Rules, RulesDocument
from qualification.verdict import Threshold, compare, fold, proved, worst

_AHEAD = timedelta(minutes=5)  # clocks of two machines may differ by this much


class RunEvidence(Record, frozen=True):
    """Everything recorded of one run, in ledger order, with the distinct commits and sources that its entries name."""

    run: str
    commits: Annotated[tuple[Commit, ...], msgspec.Meta(min_length=1)]
    sources: tuple[Subject, ...]
    results: tuple[WorkloadResult, ...]
    receipts: tuple[Receipt, ...]
    evidence_root: Sha256
    last_sequence: Count

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the distinct names of the policies in force."""
        return tuple(dict.fromkeys(result.policy.name for result in self.results))


class Verified(Record, frozen=True):
    """What walking the ledger showed: its problems in words, and the size that a signed tree head covers."""

    problems: tuple[str, ...]
    size: int
    root: str
    covered_size: int | None


def matter(evidence: RunEvidence, document: RulesDocument) -> Matter:
    """Return what people's words on this run must be bound to."""
    return Matter(
        commit=evidence.commits[0],
        policy=evidence.policies[0] if evidence.policies else "",
        evidence_root=evidence.evidence_root,
        rules_sha256=document.sha256,
        valid_days=document.rules.approvals.valid_days,
        authors=tuple(sorted({author for source in evidence.sources for author in source.authors})),
        requested_by=_requesters(evidence.results),
    )


def _requesters(results: Iterable[WorkloadResult]) -> tuple[str, ...]:
    named = {result.requested_by for result in results}
    return () if None in named else tuple(sorted(name for name in named if name is not None))


def assemble(
    evidence: RunEvidence,
    document: RulesDocument,
    verified: Verified | None,
    weighed: Weighed,
    *,
    head: Head,
    superseded_by: str | None,
    now: str,
) -> GateInputs:
    """Put together what the gate decides on. ``verified`` is None when the ledger was not walked."""
    about, rules = matter(evidence, document), document.rules
    covered = verified.covered_size if verified else None
    return GateInputs(
        run=evidence.run,
        commit=about.commit,
        policy=about.policy,
        evidence_root=about.evidence_root,
        rules_sha256=about.rules_sha256,
        decided_at=now,
        ledger_problems=None if verified is None else verified.problems,
        covered=covered is not None and evidence.last_sequence <= covered,
        source=source_standing(evidence),
        head=head,
        superseded_by=superseded_by,
        workloads=tuple(workload_standing(one, evidence.results, rules, now) for one in rules.workloads),
        receipts=tuple(receipt_standings(evidence, rules)),
        approvals_required=rules.approvals.people,
        approved_by=weighed.approved_by,
        rejected_by=weighed.rejected_by,
        held_by=weighed.held_by,
        remarks=weighed.remarks,
    )


def source_standing(evidence: RunEvidence) -> Source:
    """Say whether every result was executed from exactly one clean source under one policy."""
    if (len(evidence.commits), len(evidence.sources), len(evidence.policies)) != (1, 1, 1):
        return Source.UNKNOWN
    (source,) = evidence.sources
    if not source.files:
        return Source.UNKNOWN
    return Source.DIRTY if source.dirty else Source.EXACT


def workload_standing(
    required: RequiredWorkload, results: Iterable[WorkloadResult], rules: Rules, now: str
) -> WorkloadStanding:
    """Judge one required workload from all attempts: a FAILED attempt stays, else the last attempt counts."""
    of_name = [result for result in results if result.workload == required.name]
    here = [result for result in of_name if result.ground is required.ground]
    others = [result for result in of_name if result.ground is not required.ground]
    judged = [(result.attempt, *_judged(result, required)) for result in here]
    deciding = _deciding(judged)
    return WorkloadStanding(
        workload=required.name,
        ground=required.ground,
        verdict=worst(verdict for verdict, _ in deciding) if deciding else None,
        elsewhere=worst(result.verdict for result in others) if others else None,
        age=_age([result for result in here if result.attempt == max(one.attempt for one in here)], rules, now),
        reasons=tuple(dict.fromkeys(reason for _, reasons in deciding for reason in reasons))
        or tuple(dict.fromkeys(_shortfalls(others))),
    )


def _shortfalls(results: Iterable[WorkloadResult]) -> Iterator[str]:
    """Yield what the worst results of another ground lack: its failures where there are any."""
    listed = tuple(results)
    deciding = worst(result.verdict for result in listed)
    for result in listed:
        if result.verdict is deciding and deciding is not Verdict.PASSED:
            yield from _complaints(result)


def _deciding(judged: list[tuple[int, Verdict, tuple[str, ...]]]) -> list[tuple[Verdict, tuple[str, ...]]]:
    last = max((attempt for attempt, _, _ in judged), default=0)
    failed = any(verdict is Verdict.FAILED for _, verdict, _ in judged)
    return [
        (verdict, reasons)
        for attempt, verdict, reasons in judged
        if (verdict is Verdict.FAILED if failed else attempt == last)
    ]


def _judged(result: WorkloadResult, required: RequiredWorkload) -> tuple[Verdict, tuple[str, ...]]:
    """Return the worst of the recorded verdict, the recorded criteria, and the rules' thresholds applied again."""
    again = [_again(threshold, result.criteria) for threshold in required.criteria]
    again += _other_parameters(result, required)
    verdict = worst((result.verdict, fold(result.criteria), *(criterion.verdict for criterion in again)))
    if verdict is Verdict.PASSED:
        return verdict, ()
    judged = again if result.criteria or not result.reason else ()  # its one reason says why nothing was judged
    told = [criterion.reason for criterion in judged if criterion.verdict is not Verdict.PASSED and criterion.reason]
    return verdict, tuple(dict.fromkeys((*told, *_complaints(result))))


def _other_parameters(result: WorkloadResult, required: RequiredWorkload) -> Iterator[Criterion]:
    """Yield an INCOMPLETE criterion when other work was done than the rules ask for."""
    if result.parameters != required.parameters:
        given, asked = (_listed(each) for each in (result.parameters, required.parameters))
        reason = f"it ran with {given}, the rules ask for {asked}"
        yield Criterion(name="parameters", verdict=Verdict.INCOMPLETE, basis=Basis.MEASURED, reason=reason)


def _listed(parameters: Mapping[str, Figure]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(parameters.items())) or "no parameters"


def _complaints(result: WorkloadResult) -> Iterator[str]:
    if result.reason:
        yield result.reason
    for criterion in result.criteria:
        counts = proved(criterion)
        if counts is not Verdict.PASSED:
            claimed = " rests on the worker's word" if criterion.basis is Basis.CLAIMED else f" is {counts.value}"
            yield criterion.reason or f"{criterion.name}{claimed}"
    if not result.criteria and not result.reason:
        yield "it has no criteria"


def _again(threshold: Threshold, criteria: Iterable[Criterion]) -> Criterion:
    """Apply a threshold of the rules to the recorded figure of that name, which must be there once, in that unit."""
    named = [criterion for criterion in criteria if criterion.name == threshold.name]
    if len(named) != 1:
        return _absent(threshold, f"{threshold.name} is {'given twice' if named else 'missing'}")
    (recorded,) = named
    if recorded.unit != threshold.unit:
        return _absent(threshold, f"{threshold.name} is in {recorded.unit}, the rules ask for {threshold.unit}")
    compared = compare(threshold, recorded.measured, recorded.basis)
    return (
        compared
        if proved(compared) is compared.verdict
        else _absent(threshold, f"{threshold.name} rests on the worker's word")
    )


def _absent(threshold: Threshold, reason: str) -> Criterion:
    measured: Figure = None
    return Criterion(
        name=threshold.name, verdict=Verdict.INCOMPLETE, basis=Basis.CLAIMED, measured=measured, reason=reason
    )


def _age(results: Iterable[WorkloadResult], rules: Rules, now: str) -> Age:
    starts = [datetime.fromisoformat(result.started_at) for result in results]
    present = datetime.fromisoformat(now)
    if not starts or max(starts) > present + _AHEAD:
        return Age.UNKNOWN
    return Age.FRESH if present - min(starts) <= timedelta(days=rules.freshness.days) else Age.STALE


def receipt_standings(evidence: RunEvidence, rules: Rules) -> Iterator[ReceiptStanding]:
    """Judge the receipt of every attempt; one without a receipt stands as absent, and the worst of several counts."""
    native = any(result.ground is Ground.NATIVE for result in evidence.results)
    attempts = {result.attempt for result in evidence.results} | {receipt.attempt for receipt in evidence.receipts}
    for attempt in sorted(attempts):
        judged = [
            _receipt(receipt, rules, native=native) for receipt in evidence.receipts if receipt.attempt == attempt
        ]
        yield min(judged, key=_receipt_rank, default=ReceiptStanding(attempt=attempt))


def _receipt_rank(standing: ReceiptStanding) -> int:
    order = (ReceiptStatus.DIRTY, None, ReceiptStatus.UNVERIFIED, ReceiptStatus.CLEAN)
    return order.index(standing.status)


def _receipt(receipt: Receipt, rules: Rules, *, native: bool) -> ReceiptStanding:
    """Return CLEAN only if the receipt says so and, of a native run, every probe that the rules require read clean."""
    status, reasons = receipt.status, [receipt.reason] if receipt.reason else []
    if native:
        missing = list(_missing_probes(receipt, rules))
        reasons += missing
        if missing and status is ReceiptStatus.CLEAN:
            status = ReceiptStatus.UNVERIFIED
    return ReceiptStanding(attempt=receipt.attempt, status=status, reasons=tuple(reasons))


def _missing_probes(receipt: Receipt, rules: Rules) -> Iterator[str]:
    required = rules.probes.get(receipt.provider or "")
    if required is None:
        yield f"the rules name no probes for provider {receipt.provider or 'unknown'}"
    for name in required or ():
        statuses = {probe.status for probe in receipt.probes if probe.name == name}
        if statuses != {ProbeStatus.CLEAN}:
            said = ", ".join(sorted(status.value for status in statuses)) or "absent"
            yield f"required probe {name} is {said}"
