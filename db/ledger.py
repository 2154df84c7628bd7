"""The append-only ledger: takes signed envelopes, links them into the chain, and projects them, in one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from securesystemslib.signer import CryptoSigner
from sqlalchemy import Connection, Engine, func, select

from db import models
from db.engine import reading, writing
from db.projections import clear, insert, known_runs, project
from db.source import StoredEvidence, read_identity, stored_evidence
from qualification.errors import QualificationError
from qualification.evidence.authentic import Authentic, authenticate
from qualification.evidence.blobs import BlobStore
from qualification.evidence.canonical import sha256
from qualification.evidence.chain import Entry, genesis_hash, link
from qualification.evidence.head_sinks import publish
from qualification.evidence.heads import TreeHeads, next_head
from qualification.evidence.signing import utc_now
from qualification.evidence.trust import Trust
from qualification.records import Tombstone, TreeHead, WorkloadResult

_BATCH = 500


class RecordingError(QualificationError):
    """An envelope cannot be recorded as given; the ledger is unchanged."""


class Ledger:
    """Records facts in the database of ``engine``; the blobs that they rest on must be in ``store`` already.

    Opening it signs the tree head of an empty ledger, so that one which lost all its heads can be told from a new one.
    """

    def __init__(self, engine: Engine, store: BlobStore, trust_folder: Path, signer: CryptoSigner) -> None:
        self.engine, self.store, self._signer = engine, store, signer
        self.trust = Trust.load(trust_folder)
        with reading(engine) as connection:
            self.identity = read_identity(connection)
            size = connection.execute(select(func.count()).select_from(models.ledger)).scalar_one()
        self.heads = TreeHeads(trust_folder, self.identity)
        if size == 0:
            self._sign_first_head()

    def _sign_first_head(self) -> None:
        """Sign the head of size 0, whatever other processes append meanwhile: it holds for the ledger in any case."""
        root = genesis_hash(self.identity)
        head = TreeHead(ledger=self.identity, size=0, root=root, signed_at=utc_now())
        self.heads.write(head, self._signer, self.trust)

    def append(self, envelope: bytes) -> Entry:
        """Record one envelope durably and return its entry."""
        return self.append_all([envelope])[0]

    def append_all(self, envelopes: Sequence[bytes]) -> tuple[Entry, ...]:
        """Record several envelopes durably, all or none.

        Raises InvalidEvidence for one that does not verify, RecordingError for one that is recorded already or rests on
        a blob that is not stored, DatabaseError when the lock cannot be had or the disk is full.
        """
        facts = [authenticate(envelope, self.trust) for envelope in envelopes]
        self._require_recordable(facts)
        if any(fact.read.blobs for fact in facts):
            self.store.sync()
        with writing(self.engine) as connection:
            entries = _linked(connection, envelopes)
            _require_new(connection, entries)
            connection.execute(models.ledger.insert(), [_row(entry) for entry in entries])
            numbered = [(entry.sequence, fact.read) for entry, fact in zip(entries, facts, strict=True)]
            runs = {read.fact.run for _, read in numbered if isinstance(read.fact, WorkloadResult)}
            insert(connection, project(numbered, known_runs(connection, runs) if runs else set()))
        return entries

    def sign_head(self, *, first: bool = False) -> TreeHead:
        """Sign a tree head for the ledger as it is now; it must extend the newest one, or knowingly be the first.

        Raises TreeHeadSinkError when it is kept here but could not be brought elsewhere as well.
        """
        known = self.heads.read(self.trust)
        with stored_evidence(self.engine) as source:
            head = next_head(source, known, first=first)
        publish(head, self.heads.write(head, self._signer, self.trust))
        return head

    def unrecorded(self, envelopes: Iterable[bytes]) -> list[bytes]:
        """Return those envelopes that are not in the ledger yet, in their order."""
        digests = {sha256(envelope): envelope for envelope in envelopes}
        query = select(models.ledger.c.envelope_sha256).where(models.ledger.c.envelope_sha256.in_(list(digests)))
        with reading(self.engine) as connection:
            known = set(connection.scalars(query))
        return [envelope for digest, envelope in digests.items() if digest not in known]

    def _require_recordable(self, facts: Sequence[Authentic]) -> None:
        """Every blob that a fact rests on must be stored, or be given up by a tombstone recorded with it."""
        removed = {digest for fact in facts if isinstance(fact.read.fact, Tombstone) for digest in fact.read.fact.blobs}
        for fact in facts:
            if isinstance(fact.read.fact, TreeHead):
                raise RecordingError("a tree head is kept apart from the ledger that it speaks of, not recorded in it")
            for digest, _ in fact.read.blobs:
                if digest not in removed and not self.store.has(digest):
                    kind = fact.read.predicate_type.short
                    raise RecordingError(f"the {kind} rests on blob {digest}, which is not stored; store it first")


def rebuild(engine: Engine, trust: Trust) -> int:
    """Delete every projected row and make all of them again from the ledger; return how many entries were read.

    Raises InvalidEvidence, and changes nothing, when an entry does not verify.
    """
    with writing(engine) as connection:
        source = StoredEvidence(connection)
        clear(connection)
        runs: set[str] = set()
        facts, count = [], 0
        for entry in source.entries(0):
            facts.append((entry.sequence, authenticate(entry.envelope, trust).read))
            count += 1
            if len(facts) == _BATCH:
                insert(connection, project(facts, runs))
                facts = []
        insert(connection, project(facts, runs))
    return count


def _linked(connection: Connection, envelopes: Sequence[bytes]) -> tuple[Entry, ...]:
    query = select(models.ledger.c.sequence, models.ledger.c.hash).order_by(models.ledger.c.sequence.desc()).limit(1)
    tail = connection.execute(query).one_or_none()
    if tail is None:
        sequence, previous = 0, connection.execute(select(models.identity.c.genesis_hash)).scalar_one()
    else:
        sequence, previous = tail
    entries: list[Entry] = []
    for envelope in envelopes:
        entries.append(link(sequence + 1, previous, envelope))
        sequence, previous = entries[-1].sequence, entries[-1].hash
    return tuple(entries)


def _require_new(connection: Connection, entries: Sequence[Entry]) -> None:
    digests = [entry.envelope_sha256 for entry in entries]
    query = select(models.ledger.c.sequence).where(models.ledger.c.envelope_sha256.in_(digests)).limit(1)
    known = connection.execute(query).scalar_one_or_none()
    if known is not None or len(set(digests)) != len(digests):
        raise RecordingError(f"the same signed fact is recorded already, at sequence {known or entries[0].sequence}")


def _row(entry: Entry) -> dict[str, object]:
    return {
        "sequence": entry.sequence,
        "previous_hash": entry.previous_hash,
        "hash": entry.hash,
        "envelope_sha256": entry.envelope_sha256,
        "envelope": entry.envelope,
    }
