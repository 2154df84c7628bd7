"""in-toto Statements v1 over the records: one predicate type per kind of fact, and who may sign it.

A qualification result extends the test-result predicate v0.1 (result, configuration, passedTests, warnedTests,
failedTests) by the subject's full identity and the whole record. Every verdict but PASSED reads FAILED there, so that a
consumer who knows only test results fails closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from qualification.evidence.canonical import canonical_bytes, parse_canonical
from qualification.evidence.findings import Code, InvalidEvidence
from qualification.evidence.trust import KeyUse
from qualification.records import (
    AdoptionDecision,
    Approval,
    Criterion,
    Publication,
    Receipt,
    Record,
    Subject,
    Tombstone,
    TreeHead,
    Verdict,
    WorkloadResult,
)

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"


class PredicateType(StrEnum):
    """The kinds of fact, by the type URI that a statement carries."""

    QUALIFICATION_RESULT = "urn:trainer-rank-qualification:qualification-result:v1"
    CLEANUP_RECEIPT = "urn:trainer-rank-qualification:cleanup-receipt:v1"
    ADOPTION_DECISION = "urn:trainer-rank-qualification:adoption-decision:v1"
    HUMAN_APPROVAL = "urn:trainer-rank-qualification:human-approval:v1"
    RUN_PERMISSION = "urn:trainer-rank-qualification:run-permission:v1"
    TREE_HEAD = "urn:trainer-rank-qualification:tree-head:v1"
    TOMBSTONE = "urn:trainer-rank-qualification:tombstone:v1"
    STATUS_PUBLICATION = "urn:trainer-rank-qualification:status-publication:v1"

    @property
    def short(self) -> str:
        """Return the name people use, for example ``cleanup-receipt``."""
        return self.value.split(":")[2]


class Resource(Record, frozen=True):
    """What a statement speaks about: a name and its digests, for example ``gitCommit``."""

    name: str
    digest: dict[str, str]


class QualificationResult(Record, frozen=True, rename="camel"):
    """test-result v0.1, extended by the source's identity and the whole record of the workload."""

    result: Literal["PASSED", "FAILED"]
    configuration: tuple[Resource, ...]
    passed_tests: tuple[str, ...]
    warned_tests: tuple[str, ...]
    failed_tests: tuple[str, ...]
    source: Subject
    qualification: WorkloadResult


P = TypeVar("P")


class Statement(msgspec.Struct, Generic[P], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of every signed payload."""

    type: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(name="_type")
    subject: tuple[Resource, ...]
    predicate_type: PredicateType = msgspec.field(name="predicateType")
    predicate: P


class Kind(NamedTuple):
    """How one predicate type is signed: its predicate, its record, the signer's use, and the record's stamp."""

    predicate: type[Record]
    signer: KeyUse
    stamp: Callable[[Any], str]


KINDS = {
    PredicateType.QUALIFICATION_RESULT: Kind(
        QualificationResult, KeyUse.PIPELINE, lambda result: str(result.qualification.started_at)
    ),
    PredicateType.CLEANUP_RECEIPT: Kind(Receipt, KeyUse.PIPELINE, lambda receipt: str(receipt.taken_at)),
    PredicateType.ADOPTION_DECISION: Kind(AdoptionDecision, KeyUse.PIPELINE, lambda made: str(made.decided_at)),
    PredicateType.HUMAN_APPROVAL: Kind(Approval, KeyUse.PERSON, lambda approval: str(approval.signed_at)),
    PredicateType.RUN_PERMISSION: Kind(Approval, KeyUse.PERSON, lambda approval: str(approval.signed_at)),
    PredicateType.TREE_HEAD: Kind(TreeHead, KeyUse.PIPELINE, lambda head: str(head.signed_at)),
    PredicateType.TOMBSTONE: Kind(Tombstone, KeyUse.PIPELINE, lambda tombstone: str(tombstone.removed_at)),
    PredicateType.STATUS_PUBLICATION: Kind(Publication, KeyUse.PIPELINE, lambda shown: str(shown.published_at)),
}
PERMIT = "permit"

Fact = WorkloadResult | Receipt | AdoptionDecision | Approval | TreeHead | Tombstone | Publication


class Read(NamedTuple):
    """A statement taken apart. ``commit`` is its subject's ``gitCommit``, None for tree heads and tombstones.

    ``source`` is the full identity of the qualified source, which only a qualification result carries.
    """

    predicate_type: PredicateType
    fact: Fact
    subject: tuple[Resource, ...]
    stamp: str
    source: Subject | None = None

    @property
    def commit(self) -> str | None:
        """Return the commit that the statement speaks about."""
        return next((one.digest["gitCommit"] for one in self.subject if "gitCommit" in one.digest), None)

    @property
    def blobs(self) -> tuple[tuple[str, int | None], ...]:
        """Return digest and size (None where not recorded) of each blob that this fact rests on."""
        if isinstance(self.fact, WorkloadResult):
            documents = (self.fact.environment_sha256, self.fact.rules_sha256, self.fact.policy.sha256)
            artifacts = ((one.sha256, one.size) for one in self.fact.artifacts)
            return (*((digest, None) for digest in documents), *artifacts)
        if isinstance(self.fact, AdoptionDecision):
            return ((self.fact.rules_sha256, None),)
        return ()


def statement(fact: Fact, source: Subject | None = None) -> bytes:
    """Return the canonical bytes of the statement that ``fact`` becomes, ready to be signed.

    ``source`` is the qualified source; it is needed for results, receipts and decisions.
    """
    predicate_type = predicate_type_of(fact)
    predicate: Record = _result(fact, _needed(source)) if isinstance(fact, WorkloadResult) else fact
    written: Statement[Record] = Statement(
        type=STATEMENT_TYPE,
        subject=tuple(_subject(fact, source)),
        predicate_type=predicate_type,
        predicate=predicate,
    )
    return canonical_bytes(written)


def predicate_type_of(fact: Fact) -> PredicateType:
    """Return the predicate type of a fact; a permission to run is an approval of its own kind."""
    match fact:
        case WorkloadResult():
            return PredicateType.QUALIFICATION_RESULT
        case Receipt():
            return PredicateType.CLEANUP_RECEIPT
        case AdoptionDecision():
            return PredicateType.ADOPTION_DECISION
        case TreeHead():
            return PredicateType.TREE_HEAD
        case Tombstone():
            return PredicateType.TOMBSTONE
        case Publication():
            return PredicateType.STATUS_PUBLICATION
        case Approval():
            return PredicateType.RUN_PERMISSION if fact.action == PERMIT else PredicateType.HUMAN_APPROVAL


def _needed(source: Subject | None) -> Subject:
    if source is None:
        raise TypeError("this fact speaks about a source; give the subject it was taken from")
    return source


def _subject(fact: Fact, source: Subject | None) -> Iterable[Resource]:
    match fact:
        case TreeHead():
            yield Resource(name=f"ledger:{fact.ledger}", digest={"sha256": fact.root})
        case Tombstone():
            yield from (Resource(name="blob", digest={"sha256": digest}) for digest in fact.blobs)
        case Publication():
            yield Resource(name="source", digest={"gitCommit": fact.commit})
        case Approval():
            yield Resource(name="source", digest={"gitCommit": fact.commit})
            if fact.evidence_root is not None:
                yield Resource(name="evidence", digest={"sha256": fact.evidence_root})
        case _:
            known = _needed(source)
            digests = {"gitCommit": known.commit, "gitTree": known.tree, "sha256": known.manifest_sha256}
            yield Resource(name=known.repository, digest=digests)
            if isinstance(fact, AdoptionDecision):
                yield Resource(name="evidence", digest={"sha256": fact.evidence_root})


def _result(fact: WorkloadResult, source: Subject) -> QualificationResult:
    return QualificationResult(
        result="PASSED" if fact.verdict is Verdict.PASSED else "FAILED",
        configuration=(
            Resource(name=f"policy:{fact.policy.name}", digest={"sha256": fact.policy.sha256}),
            Resource(name="rules", digest={"sha256": fact.rules_sha256}),
            Resource(name="environment", digest={"sha256": fact.environment_sha256}),
        ),
        passed_tests=_names(fact.criteria, Verdict.PASSED),
        warned_tests=_names(fact.criteria, Verdict.INCONCLUSIVE, Verdict.INCOMPLETE),
        failed_tests=_names(fact.criteria, Verdict.FAILED),
        source=source,
        qualification=fact,
    )


def _names(criteria: Iterable[Criterion], *verdicts: Verdict) -> tuple[str, ...]:
    return tuple(one.name for one in criteria if one.verdict in verdicts)


_DECODERS: dict[PredicateType, msgspec.json.Decoder[Statement[Any]]] = {
    predicate_type: msgspec.json.Decoder(Statement[kind.predicate])  # type: ignore[name-defined]
    for predicate_type, kind in KINDS.items()
}


def read_statement(payload: bytes) -> Read:
    """Take apart the payload of a verified envelope.

    Raises InvalidEvidence when it is not canonical, of an unknown type, not of the form of its predicate, or when its
    subject and its predicate contradict each other.
    """
    plain = parse_canonical(payload)
    named = plain.get("predicateType") if isinstance(plain, dict) else None
    try:
        predicate_type = PredicateType(str(named))
    except ValueError:
        raise InvalidEvidence(Code.STATEMENT, f"is of the unknown predicate type {named!r}") from None
    try:
        decoded = _DECODERS[predicate_type].decode(payload)
    except msgspec.ValidationError as error:
        raise InvalidEvidence(Code.STATEMENT, f"is no {predicate_type.short}: {error}") from None
    return _checked(decoded)


def _checked(decoded: Statement[Any]) -> Read:
    predicate, kind = decoded.predicate, KINDS[decoded.predicate_type]
    source, fact = None, predicate
    if isinstance(predicate, QualificationResult):
        source, fact = predicate.source, predicate.qualification
        if predicate != _result(fact, source):
            raise InvalidEvidence(Code.STATEMENT, "has a test result that contradicts its record")
    if predicate_type_of(fact) is not decoded.predicate_type:
        raise InvalidEvidence(Code.STATEMENT, f"is a {predicate_type_of(fact).short} under another type")
    read = Read(decoded.predicate_type, fact, decoded.subject, kind.stamp(predicate), source)
    if isinstance(fact, Receipt | AdoptionDecision):
        if read.commit is None:
            raise InvalidEvidence(Code.STATEMENT, "names no commit")
    elif read.subject != tuple(_subject(fact, source)):
        raise InvalidEvidence(Code.STATEMENT, "has a subject that contradicts its predicate")
    return read
