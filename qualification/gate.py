"""The gate: a pure truth table from recorded inputs to adopted, held or rejected. The first row that matches wins.

Rows: evidence that does not verify is held as tampered; a failed workload or a permitted person's rejection rejects;
all conditions met adopts; otherwise the first unmet condition names the row that holds, and every unmet one is a
reason. There is no other row, so nothing is adopted by falling through. Each condition asks for a proof, never for the
absence of a complaint: an input that is missing leaves it unmet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

import msgspec

from qualification.records import (
    AdoptionDecision,
    Commit,
    Count,
    Decision,
    Figure,
    Ground,
    ReceiptStatus,
    Record,
    Sha256,
    Stamp,
    Verdict,
)

Flat = dict[str, Figure | bool | tuple[str, ...]]


class Source(StrEnum):
    """Whether the executed source is exactly the named commit."""

    EXACT = "exact"
    DIRTY = "dirty"
    UNKNOWN = "unknown"


class Head(StrEnum):
    """How the commit stands to the reference it was taken from, read just before the decision.

    ``FIXED``: it was named by its full id, no reference is followed.
    """

    FIXED = "fixed"
    CURRENT = "current"
    MOVED = "moved"
    UNREADABLE = "unreadable"


class Age(StrEnum):
    """How old evidence is against the rules' freshness; a start in the future is UNKNOWN."""

    FRESH = "fresh"
    STALE = "stale"
    UNKNOWN = "unknown"


class WorkloadStanding(Record, frozen=True):
    """How one required workload stands: its verdict on the required ground, and the one on the other ground if any."""

    workload: str
    ground: Ground
    verdict: Verdict | None = None
    elsewhere: Verdict | None = None
    age: Age = Age.UNKNOWN
    reasons: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return the name people use, for example ``full_step on native``."""
        return f"{self.workload} on {self.ground.value}"


class ReceiptStanding(Record, frozen=True):
    """How the cleanup of one attempt stands, after the rules' required probes were looked for; None when absent."""

    attempt: Count
    status: ReceiptStatus | None = None
    reasons: tuple[str, ...] = ()


class GateInputs(Record, frozen=True):
    """Everything a decision rests on.

    ``ledger_problems`` is None until the ledger was verified, and empty when it verified. ``covered`` says that every
    entry of the run lies below a signed tree head. ``approved_by`` names the distinct people whose approval counts.
    ``remarks`` names statements that did not count, and why; it decides nothing.
    """

    run: str
    commit: Commit
    policy: str
    evidence_root: Sha256
    rules_sha256: Sha256
    decided_at: Stamp
    ledger_problems: tuple[str, ...] | None = None
    covered: bool = False
    source: Source = Source.UNKNOWN
    head: Head = Head.UNREADABLE
    superseded_by: str | None = None
    workloads: tuple[WorkloadStanding, ...] = ()
    receipts: tuple[ReceiptStanding, ...] = ()
    approvals_required: Count = 1
    approved_by: tuple[str, ...] = ()
    rejected_by: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class Ruling(Record, frozen=True):
    """What the gate answers, the row of the table that applied, and the reasons in words."""

    decision: Decision
    row: str
    reasons: tuple[str, ...]


class Row(msgspec.Struct, frozen=True):
    """One named line of the table: ``text`` says what it asks in words, ``look`` yields why it is not (or is) so."""

    name: str
    text: str
    look: Callable[[GateInputs], Iterator[str]]


def _tampered(inputs: GateInputs) -> Iterator[str]:
    yield from inputs.ledger_problems or ()


def _failed(inputs: GateInputs) -> Iterator[str]:
    for standing in inputs.workloads:
        if Verdict.FAILED in (standing.verdict, standing.elsewhere):
            yield f"{standing.workload} FAILED{_because(standing.reasons)}"


def _rejected(inputs: GateInputs) -> Iterator[str]:
    yield from (f"{person} rejected it" for person in inputs.rejected_by)


def _unverified(inputs: GateInputs) -> Iterator[str]:
    if inputs.ledger_problems is None:
        yield "the ledger was not verified"
    if not inputs.covered:
        yield "no signed tree head covers every entry of this run"


def _unclean(inputs: GateInputs) -> Iterator[str]:
    if not inputs.receipts:
        yield "there is no cleanup receipt"
    for receipt in inputs.receipts:
        if receipt.status is not ReceiptStatus.CLEAN:
            said = receipt.status.value if receipt.status else "absent"
            yield f"receipt of attempt {receipt.attempt} is {said}{_because(receipt.reasons)}"


def _nothing_required(inputs: GateInputs) -> Iterator[str]:
    if not inputs.workloads:
        yield "the gate rules require no workload, which can never adopt"


def _rehearsed(inputs: GateInputs) -> Iterator[str]:
    for standing in inputs.workloads:
        if standing.ground is not Ground.NATIVE:
            yield f"the rules ask for {standing.label}, and rehearsal evidence can never adopt"
        elif standing.verdict is None and standing.elsewhere is not None:
            short = "" if standing.elsewhere is Verdict.PASSED else f", and it is {standing.elsewhere.value}"
            yield f"{standing.workload} is rehearsal evidence, native is required{short}{_because(standing.reasons)}"


def _incomplete(inputs: GateInputs) -> Iterator[str]:
    for standing in inputs.workloads:
        if standing.verdict is None and standing.elsewhere is None:
            yield f"{standing.label} has no result"
        if standing.verdict is Verdict.INCOMPLETE:
            yield f"{standing.label} is INCOMPLETE{_because(standing.reasons)}"


def _inconclusive(inputs: GateInputs) -> Iterator[str]:
    for standing in inputs.workloads:
        if standing.verdict is Verdict.INCONCLUSIVE:
            yield f"{standing.label} is INCONCLUSIVE{_because(standing.reasons)}"


def _inexact(inputs: GateInputs) -> Iterator[str]:
    if inputs.source is not Source.EXACT:
        yield f"the executed source is {inputs.source.value}, not exactly {inputs.commit}"


def _moved(inputs: GateInputs) -> Iterator[str]:
    if inputs.head is Head.MOVED:
        yield f"{inputs.commit} is no longer the head of its reference"
    if inputs.head is Head.UNREADABLE:
        yield "the reference that the commit was taken from could not be read"


def _stale(inputs: GateInputs) -> Iterator[str]:
    for standing in inputs.workloads:
        if standing.verdict is not None and standing.age is not Age.FRESH:
            known = standing.age is Age.STALE
            yield f"{standing.label} is {'older than the rules allow' if known else 'of unknown age'}"


def _superseded(inputs: GateInputs) -> Iterator[str]:
    if inputs.superseded_by is not None:
        yield f"run {inputs.superseded_by} of the same commit and policy is newer"


def _held(inputs: GateInputs) -> Iterator[str]:
    yield from (f"{person} holds it" for person in inputs.held_by)


def _unapproved(inputs: GateInputs) -> Iterator[str]:
    given, needed = len(set(inputs.approved_by)), max(inputs.approvals_required, 1)
    if given < needed:
        yield f"{given} of {needed} approvals"


def _because(reasons: tuple[str, ...]) -> str:
    return f" ({'; '.join(reasons)})" if reasons else ""


TAMPERED = Row("tampered", "the evidence does not verify", _tampered)
REJECTIONS = (
    Row("workload_failed", "a required workload FAILED", _failed),
    Row("person_rejected", "a permitted person rejected", _rejected),
)
CONDITIONS = (
    Row("unverified", "the ledger was verified up to a signed tree head that covers the run", _unverified),
    Row("unclean", "every attempt has a receipt, and every receipt is CLEAN with the required probes", _unclean),
    Row("nothing_required", "the rules require at least one workload", _nothing_required),
    Row("rehearsal", "every required workload has native evidence", _rehearsed),
    Row("incomplete", "every required workload has a result, and none is INCOMPLETE", _incomplete),
    Row("inconclusive", "no required workload is INCONCLUSIVE", _inconclusive),
    Row("inexact_source", "the executed source is exactly the commit", _inexact),
    Row("head_moved", "the commit is fixed, or still the head of its reference", _moved),
    Row("stale", "every required workload is fresh", _stale),
    Row("superseded", "no newer run of the same commit and policy exists", _superseded),
    Row("person_held", "no permitted person holds it", _held),
    Row("unapproved", "enough distinct permitted people approved", _unapproved),
)


def _met(inputs: GateInputs) -> Iterator[str]:
    if not any(reason for row in CONDITIONS for reason in row.look(inputs)):
        yield "every condition is met"


ADOPTION = Row("adopted", "every condition below is met", _met)


class Line(Record, frozen=True):
    """One line of the table as it looks for given inputs; ``applies`` marks the one that decides."""

    row: str
    text: str
    decision: Decision
    applies: bool
    reasons: tuple[str, ...] = ()


def table(inputs: GateInputs) -> tuple[Line, ...]:
    """Return every line of the table in order, each with what it found, and the one that applies marked."""
    ruling = decide(inputs)
    rows = (
        (TAMPERED, Decision.HELD),
        *((row, Decision.REJECTED) for row in REJECTIONS),
        (ADOPTION, Decision.ADOPTED),
        *((row, Decision.HELD) for row in CONDITIONS),
    )
    return tuple(
        Line(
            row=row.name,
            text=row.text,
            decision=decision,
            applies=row.name == ruling.row,
            reasons=tuple(row.look(inputs)),
        )
        for row, decision in rows
    )


def decide(inputs: GateInputs) -> Ruling:
    """Apply the table. Pure: the same inputs give the same decision, row and reasons, whenever and wherever."""
    if reasons := tuple(TAMPERED.look(inputs)):
        return Ruling(decision=Decision.HELD, row=TAMPERED.name, reasons=reasons)
    for row in REJECTIONS:
        if reasons := tuple(row.look(inputs)):
            return Ruling(decision=Decision.REJECTED, row=row.name, reasons=reasons)
    unmet = tuple((row.name, reason) for row in CONDITIONS for reason in row.look(inputs))
    if reasons := tuple(ADOPTION.look(inputs)):
        return Ruling(decision=Decision.ADOPTED, row=ADOPTION.name, reasons=reasons)
    return Ruling(decision=Decision.HELD, row=unmet[0][0], reasons=tuple(reason for _, reason in unmet))


def decide_again(decision: AdoptionDecision) -> Ruling:
    """Replay a recorded decision from the inputs stored in it, and nothing else.

    Raises:
        msgspec.ValidationError: its inputs are not those of this version of the table.
    """
    return decide(unflatten(decision.inputs))


def flatten(inputs: GateInputs) -> Flat:
    """Return the inputs as the flat mapping that a decision statement holds; ``unflatten`` gives them back exactly."""
    return dict(_flat("", msgspec.to_builtins(inputs)))


def _flat(path: str, value: object) -> Iterator[tuple[str, Figure | bool | tuple[str, ...]]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from _flat(f"{path}.{index}", inner)
    elif isinstance(value, list | tuple):
        yield path, tuple(value)
    elif value is None or isinstance(value, int | str):
        yield path, value
    else:
        raise TypeError(f"{path} holds {type(value).__name__}, which no statement can")


def unflatten(flat: Flat) -> GateInputs:
    """Rebuild the inputs of a recorded decision.

    Raises:
        msgspec.ValidationError: the mapping holds something else than gate inputs of this version.
    """
    root: dict[str, object] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = root
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise msgspec.ValidationError(f"{path} lies below a value")
            node = child
        node[leaf] = list(value) if isinstance(value, tuple) else value
    return msgspec.convert(_lists(root), GateInputs)


def _lists(node: object) -> object:
    if not isinstance(node, dict):
        return node
    if node and all(key.isdigit() for key in node):
        return [_lists(node[key]) for key in sorted(node, key=int)]
    return {key: _lists(value) for key, value in node.items()}
