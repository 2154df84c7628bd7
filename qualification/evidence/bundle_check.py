"""Verify a bundle: its head, its chain, each envelope, and that what the envelopes rest on is inside."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from qualification.evidence.authentic import Authentic, authenticate
from qualification.evidence.bundle import Bundle
from qualification.evidence.canonical import is_root_of_first, sha256
from qualification.evidence.chain import entry_hash, genesis_hash
from qualification.evidence.findings import Code, Finding, InvalidEvidence
from qualification.evidence.trust import Trust
from qualification.evidence.verify import clock_findings, in_order
from qualification.records import AdoptionDecision, Count, Receipt, Record, Tombstone, TreeHead, WorkloadResult


class BundleVerification(Record, frozen=True):
    """What a bundle shows. ``head`` is the ledger's size at the signed tree head inside."""

    ledger: str
    run: str
    entries: Count
    blobs: Count
    withheld: Count
    head: Count | None
    findings: tuple[Finding, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether all of it verifies."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """Return the first finding."""
        return self.findings[0] if self.findings else None


def verify_bundle(bundle: Bundle, trust: Trust, now: datetime | None = None) -> BundleVerification:
    """Check a bundle that was read against the keys that are trusted here."""
    manifest = bundle.manifest
    findings: list[Finding] = []
    head = _head(bundle, trust, findings)
    if head is not None:
        findings += _chain(bundle, head)
        findings += clock_findings(head, now or datetime.now(UTC))
    facts = _facts(bundle, trust, findings)
    if not findings:
        findings += _rests_on(bundle, facts)
        findings += _completeness(bundle, facts)
    return BundleVerification(
        ledger=manifest.ledger,
        run=manifest.run,
        entries=len(manifest.entries),
        blobs=len(manifest.blobs),
        withheld=len(manifest.withheld),
        head=head.size if head is not None else None,
        findings=in_order(findings),
    )


def _head(bundle: Bundle, trust: Trust, findings: list[Finding]) -> TreeHead | None:
    try:
        fact = authenticate(bundle.head, trust).read.fact
    except InvalidEvidence as error:
        findings.append(Finding(code=Code.TREE_HEAD, place="head.json", text=f"{error.text} [{error.code}]"))
        return None
    if not isinstance(fact, TreeHead) or fact.ledger != bundle.manifest.ledger:
        findings.append(Finding(code=Code.TREE_HEAD, place="head.json", text="is no tree head of this ledger"))
        return None
    return fact


def _chain(bundle: Bundle, head: TreeHead) -> Iterator[Finding]:
    """Compute the chain from the manifest's digests and compare it with the signed head."""
    manifest = bundle.manifest
    root, size = manifest.root, manifest.after
    if size == 0 and root != genesis_hash(manifest.ledger):
        yield Finding(code=Code.REWRITTEN, place="chain", text="does not start at the ledger's genesis")
    seen: dict[str, int] = {}
    for size, digest in enumerate(manifest.chain, manifest.after + 1):
        if digest in seen:
            text = f"repeats the envelope of sequence {seen[digest]}"
            yield Finding(code=Code.REPEATED, place="chain", text=text, sequence=size)
        seen[digest] = size
        root = entry_hash(size, root, digest)
    if size < head.size:
        text = f"ends at {size}, but the signed head is of size {head.size}"
        yield Finding(code=Code.TRUNCATED, place="chain", text=text, sequence=size + 1)
    elif (size, root) != (head.size, head.root):
        yield Finding(code=Code.REWRITTEN, place="chain", text="does not lead to the signed head", sequence=size)


def _facts(bundle: Bundle, trust: Trust, findings: list[Finding]) -> dict[int, Authentic]:
    facts: dict[int, Authentic] = {}
    for sequence, envelope in bundle.envelopes.items():
        if sha256(envelope) != bundle.manifest.chain[sequence - bundle.manifest.after - 1]:
            text = "is not the envelope of the chain"
            findings.append(Finding(code=Code.ENTRY_HASH, place="entry", text=text, sequence=sequence))
        try:
            facts[sequence] = authenticate(envelope, trust)
        except InvalidEvidence as error:
            findings.append(Finding(code=error.code, place="envelope", text=error.text, sequence=sequence))
    return facts


def _rests_on(bundle: Bundle, facts: dict[int, Authentic]) -> Iterator[Finding]:
    """Each blob that a fact rests on must be inside, or be private and withheld, or removed by a tombstone."""
    removed: set[str] = set()
    private: set[str] = set()
    for fact in facts.values():
        if isinstance(fact.read.fact, Tombstone):
            removed.update(fact.read.fact.blobs)
        if isinstance(fact.read.fact, WorkloadResult):
            private.update(one.sha256 for one in fact.read.fact.artifacts if one.private)
    absent = removed | (private & set(bundle.manifest.withheld))
    for sequence, fact in facts.items():
        for digest, size in fact.read.blobs:
            held = bundle.manifest.blobs.get(digest)
            if held is None and digest not in absent:
                text = "is not in the bundle"
                yield Finding(code=Code.BLOB_MISSING, place=f"blob {digest}", text=text, sequence=sequence)
            elif held is not None and size not in (None, held):
                text = f"has {held} bytes, recorded are {size}"
                yield Finding(code=Code.BLOB_ALTERED, place=f"blob {digest}", text=text, sequence=sequence)


def _completeness(bundle: Bundle, facts: dict[int, Authentic]) -> Iterator[Finding]:
    """Each decision names the root of the evidence it was made on: a result that was left out changes it."""
    evidence = {
        sequence: bundle.manifest.chain[sequence - bundle.manifest.after - 1]
        for sequence, fact in facts.items()
        if isinstance(fact.read.fact, WorkloadResult | Receipt)
    }
    for sequence, fact in facts.items():
        before = [digest for at, digest in evidence.items() if at < sequence]
        made = fact.read.fact
        if getattr(made, "run", bundle.manifest.run) != bundle.manifest.run:
            text = f"speaks of another run than {bundle.manifest.run}"
            yield Finding(code=Code.BUNDLE, place="entry", text=text, sequence=sequence)
        if isinstance(made, AdoptionDecision) and not is_root_of_first(made.evidence_root, before):
            text = "does not hold all the evidence that this decision was made on"
            yield Finding(code=Code.BUNDLE, place="decision", text=text, sequence=sequence)
