"""Walk a ledger and everything derived from it, and say what does not verify, first things first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from qualification.evidence.authentic import Authentic, authenticate
from qualification.evidence.blobs import BlobStore, is_digest
from qualification.evidence.canonical import sha256
from qualification.evidence.chain import Entry, entry_hash, genesis_hash
from qualification.evidence.findings import Code, Finding, InvalidEvidence
from qualification.evidence.heads import HeadsRead
from qualification.evidence.sink import EvidenceSource
from qualification.evidence.trust import Trust
from qualification.records import Count, Record, Sha256, Tombstone, TreeHead

CLOCK_TOLERANCE = timedelta(hours=2)
"""How far a tree head's stamp may lie ahead of this machine's clock; clocks disagree, and may be an hour off."""

_BATCH = 500


class Verification(Record, frozen=True):
    """What a walk over the evidence showed. It verifies when there is no finding.

    ``head`` is the size at the newest tree head that verifies; ``checked_after`` is 0 for the whole ledger, else the
    size of the tree head that was taken as given.
    """

    ledger: str
    size: Count
    root: Sha256
    head: Count | None
    checked_after: Count
    blobs: Count
    findings: tuple[Finding, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether everything that was looked at verifies."""
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """Return the finding with the lowest sequence."""
        return self.findings[0] if self.findings else None


def verify(
    source: EvidenceSource,
    store: BlobStore,
    trust: Trust,
    heads: HeadsRead,
    *,
    since_head: bool = False,
    now: datetime | None = None,
) -> Verification:
    """Check every entry, blob, projection, trigger and tree head; ``since_head``: only what follows the newest head."""
    newest = heads.newest
    start = newest.size if newest is not None and since_head else 0
    walk = _Walk(source, trust, {size: one.head.root for size, one in heads.signed.items()}, start)
    walk.findings += heads.findings
    walk.run()
    walk.findings += _head_findings(newest, walk.size, now or datetime.now(UTC))
    walk.findings += source.protections()
    walk.findings += blob_findings(store, walk.blobs, walk.removed, everything=not since_head)
    return Verification(
        ledger=source.ledger,
        size=walk.size,
        root=walk.root,
        head=newest.size if newest is not None else None,
        checked_after=start,
        blobs=len(walk.blobs),
        findings=in_order(walk.findings),
    )


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return findings by sequence; those that belong to no entry come last."""
    return tuple(sorted(findings, key=lambda one: (one.sequence is None, one.sequence or 0)))


class _Walk:
    """The state of one walk along the chain: where it is, what it met, and what it found."""

    def __init__(self, source: EvidenceSource, trust: Trust, roots: Mapping[int, str], start: int) -> None:
        self.source, self.trust, self.roots = source, trust, roots
        self.size, self.root = start, roots[start] if start else genesis_hash(source.ledger)
        self.findings: list[Finding] = []
        self.blobs: dict[str, tuple[int | None, int]] = {}
        self.removed: set[str] = set()
        self._seen: dict[str, int] = {}

    def run(self) -> None:
        self._check_root()
        if self.size and getattr(self.source.entry(self.size), "hash", None) != self.root:
            self._found(Code.REWRITTEN, "ledger", "has another hash here than the signed tree head")
        compared, facts = self.size, list[tuple[int, Authentic]]()
        for entry in self.source.entries(self.size):
            self._check_chain(entry)
            facts += self._authentic(entry)
            if len(facts) >= _BATCH:
                self.findings += self.source.disagreements(facts, compared, self.size)
                compared, facts = self.size, []
        self.findings += self.source.disagreements(facts, compared, None)

    def _found(self, code: Code, place: str, text: str, sequence: int | None = None) -> None:
        self.findings.append(Finding(code=code, place=place, text=text, sequence=sequence or self.size))

    def _check_chain(self, entry: Entry) -> None:
        expected = self.size + 1
        self.size = entry.sequence
        if entry.sequence > expected:
            self._found(Code.SEQUENCE, "ledger", f"is missing; {entry.sequence} is the next", expected)
        elif entry.sequence < expected:
            self._found(Code.SEQUENCE, "ledger", f"comes after sequence {expected - 1}")
        elif entry.previous_hash != self.root:
            self._found(Code.PREVIOUS_HASH, "ledger", "does not name the hash of the entry before it")
        digest = sha256(entry.envelope)
        actual = entry_hash(entry.sequence, self.root, digest) if is_digest(self.root) else ""
        if entry.sequence == expected and (entry.hash, entry.envelope_sha256) != (actual, digest):
            self._found(Code.ENTRY_HASH, "ledger", "does not have the hash of its stored bytes")
        if digest in self._seen:
            self._found(Code.REPEATED, "ledger", f"repeats the envelope of sequence {self._seen[digest]}")
        self._seen[digest] = entry.sequence
        self.root = entry.hash
        self._check_root()

    def _check_root(self) -> None:
        if self.roots.get(self.size, self.root) != self.root:
            self._found(Code.REWRITTEN, "ledger", "has another hash here than the signed tree head")

    def _authentic(self, entry: Entry) -> Iterator[tuple[int, Authentic]]:
        try:
            authentic = authenticate(entry.envelope, self.trust)
        except InvalidEvidence as error:
            self._found(error.code, "envelope", error.text)
            return
        for digest, size in authentic.read.blobs:
            known = self.blobs.setdefault(digest, (size, entry.sequence))
            if size is not None and known[0] is None:
                self.blobs[digest] = (size, known[1])
            elif size is not None and known[0] != size:
                self._found(Code.BLOB_ALTERED, f"blob {digest}", f"is recorded with {known[0]} and with {size} bytes")
        if isinstance(authentic.read.fact, Tombstone):
            self.removed.update(authentic.read.fact.blobs)
        yield entry.sequence, authentic


def _head_findings(head: TreeHead | None, size: int, now: datetime) -> Iterator[Finding]:
    if head is None:
        if size:
            yield Finding(
                code=Code.TREE_HEAD_MISSING,
                place="tree heads",
                text=f"none is signed for this ledger of {size} entries",
            )
        return
    if head.size > size:
        yield Finding(
            code=Code.TRUNCATED,
            place="ledger",
            text=f"ends at {size}, but a tree head of size {head.size} was signed at {head.signed_at}",
            sequence=size + 1,
        )
    yield from clock_findings(head, now)


def clock_findings(head: TreeHead, now: datetime) -> Iterator[Finding]:
    """Say when the clock is behind a tree head: it cannot judge what has expired."""
    if datetime.fromisoformat(head.signed_at) > now + CLOCK_TOLERANCE:
        yield Finding(
            code=Code.CLOCK_BEHIND,
            place="clock",
            text=f"reads {now:%Y-%m-%dT%H:%M:%SZ}, but the newest tree head was signed at {head.signed_at}",
        )


def blob_findings(
    store: BlobStore, recorded: Mapping[str, tuple[int | None, int]], removed: set[str], *, everything: bool
) -> Iterator[Finding]:
    """Check each recorded blob (digest to size and first sequence) and, with ``everything``, the rest of the folder."""
    for digest, (size, sequence) in recorded.items():
        try:
            store.check(digest, size)
        except InvalidEvidence as error:
            if error.code is not Code.BLOB_MISSING or digest not in removed:
                yield Finding(code=error.code, place=f"blob {digest}", text=error.text, sequence=sequence)
    for name in store.names() if everything else ():
        if not is_digest(name):
            yield Finding(code=Code.BLOB_UNSAFE, place=f"blob {name!r}", text="is not named by 64 hex digits")
        elif name not in recorded:
            try:
                store.check(name)
            except InvalidEvidence as error:
                yield Finding(code=error.code, place=f"blob {name}", text=error.text)
