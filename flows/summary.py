"""What a run amounts to, in one document: for people as a table and Markdown, for programs as JSON."""

from __future__ import annotations

import textwrap
from typing import Any

import msgspec
from rich.table import Table

from db.deciding import Case
from flows.cli.exits import ExitCode, for_run, strongest
from qualification.gate import TAMPERED
from qualification.records import (
    AdoptionDecision,
    Decision,
    Ground,
    Receipt,
    ReceiptStatus,
    Subject,
    Verdict,
    WorkloadResult,
)

SCHEMA = "qualify.run/1"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run: what ran, what it showed, what cleanup showed, what the gate answers, and what to type next."""

    schema: str = SCHEMA
    run: str
    attempt: int
    subject: Subject
    policy: str
    ground: Ground
    workloads: tuple[WorkloadResult, ...]
    receipt: Receipt | None
    decision: AdoptionDecision
    exit_code: int
    next: str


def summarise(case: Case) -> Summary:
    """Return the summary of a run's newest attempt, from its evidence alone."""
    evidence, decision = case.evidence, case.decision()
    attempt = max(result.attempt for result in evidence.results)
    results = tuple(result for result in evidence.results if result.attempt == attempt)
    receipt = next((one for one in reversed(evidence.receipts) if one.attempt == attempt), None)
    code = for_run((result.verdict for result in results), [receipt.status] if receipt else [])
    if decision.row == TAMPERED.name:
        code = strongest((code, ExitCode.TAMPERED))
    return Summary(
        run=evidence.run,
        attempt=attempt,
        subject=evidence.sources[-1],
        policy=results[0].policy.name,
        ground=results[0].ground,
        workloads=results,
        receipt=receipt,
        decision=decision,
        exit_code=code,
        next=_next(evidence.run, decision, code),
    )


def _next(run: str, decision: AdoptionDecision, code: ExitCode) -> str:
    if code is ExitCode.TAMPERED:
        return "qualify verify"
    if code is not ExitCode.PASSED:
        return f"qualify evidence show {run}"
    return f"qualify gate {'check' if decision.decision is Decision.ADOPTED else 'explain'} {run}"


def as_dict(summary: Summary) -> dict[str, Any]:
    """Return the document as plain JSON values; the hashes of the subject's files are left to the evidence."""
    document: dict[str, Any] = msgspec.to_builtins(summary)
    del document["subject"]["files"]
    del document["decision"]["inputs"]
    return document


def table(summary: Summary) -> Table:
    """Return the closing table for people."""
    dirty = " with uncommitted changes" if summary.subject.dirty else ""
    title = f"{summary.subject.repository} {summary.subject.commit[:12]}{dirty}, policy {summary.policy}"
    shown = Table.grid(padding=(0, 2))
    shown.title, shown.title_justify, shown.title_style = title, "left", "bold"
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for result in summary.workloads:
        said = result.reason or f"{len(result.criteria)} criteria in {result.duration_ms / 1000:.1f} s, {result.ground}"
        shown.add_row(result.workload, f"[{_colour(result.verdict)}]{result.verdict}", said)
    receipt, decision = summary.receipt, summary.decision
    if receipt is None:
        shown.add_row("receipt", "[yellow]absent", "qualify sweep takes it once the lease has run out")
    else:
        swept = f"{len(receipt.probes)} probes, {len(receipt.swept)} processes swept"
        shown.add_row("receipt", f"[{_colour(receipt.status)}]{receipt.status}", receipt.reason or swept)
    shown.add_row("decision", f"[{_colour(decision.decision)}]{decision.decision}", _shortened(decision.reasons))
    return shown


def _colour(word: Verdict | ReceiptStatus | Decision) -> str:
    good, bad = (
        (Verdict.PASSED, ReceiptStatus.CLEAN, Decision.ADOPTED),
        (Verdict.FAILED, ReceiptStatus.DIRTY, Decision.REJECTED),
    )
    return "green" if word in good else "red" if word in bad else "yellow"


def markdown(summary: Summary) -> str:
    """Return the document as Markdown, for an artifact."""
    rows = "\n".join(f"| {row['what']} | {row['answer']} | {row['reason']} |" for row in rows_of(summary))
    subject = summary.subject
    return (
        f"# Run {summary.run}\n\n"
        f"`{subject.repository}` at `{subject.commit}`{' (uncommitted changes)' if subject.dirty else ''}, "
        f"policy `{summary.policy}`, ground `{summary.ground}`\n\n"
        f"| what | answer | reason |\n|---|---|---|\n{rows}\n\nNext: `{summary.next}`\n"
    )


def rows_of(summary: Summary) -> list[dict[str, str]]:
    """Return one row per workload, receipt and decision, for a table artifact."""
    results = [
        {"what": result.workload, "answer": result.verdict.value, "reason": result.reason or ""}
        for result in summary.workloads
    ]
    receipt, decision = summary.receipt, summary.decision
    return [
        *results,
        {"what": "receipt", "answer": receipt.status.value if receipt else "absent", "reason": _because(receipt)},
        {"what": "decision", "answer": decision.decision.value, "reason": "; ".join(decision.reasons)},
    ]


def _because(receipt: Receipt | None) -> str:
    return (receipt.reason or "") if receipt else "no receipt was taken"


def _shortened(reasons: tuple[str, ...], width: int = 160) -> str:
    return "; ".join(textwrap.shorten(reason, width, placeholder=" ...") for reason in reasons)
