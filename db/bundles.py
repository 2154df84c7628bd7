"""Bring one run's evidence from a database into a bundle, and from a bundle into another database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from securesystemslib.signer import CryptoSigner
from sqlalchemy import Connection, select

from db import models
from db.ledger import Ledger
from db.source import StoredEvidence, stored_evidence
from qualification.errors import ConfigurationError, TamperedError
from qualification.evidence.authentic import Authentic, authenticate
from qualification.evidence.blobs import BlobStore
from qualification.evidence.bundle import (
    FORMAT,
    Bundle,
    Manifest,
    blob_name,
    members,
    opened,
    read_bundle,
    write_bundle,
)
from qualification.evidence.bundle_check import BundleVerification, verify_bundle
from qualification.evidence.chain import Entry, genesis_hash
from qualification.evidence.findings import InvalidEvidence
from qualification.evidence.heads import HeadsRead
from qualification.evidence.signing import sign, utc_now
from qualification.evidence.statements import statement
from qualification.evidence.trust import Trust, TrustedKey
from qualification.records import Tombstone, WorkloadResult

_CHUNK = 1 << 20


class Contents(NamedTuple):
    """What a bundle of one run is written from."""

    manifest: Manifest
    head: bytes
    entries: tuple[Entry, ...]
    keys: tuple[TrustedKey, ...]


class Imported(NamedTuple):
    """What an import recorded: the bundle's own check, the new entries, and how many were recorded before."""

    verification: BundleVerification
    entries: tuple[Entry, ...]
    known: int


def export_bundle(ledger: Ledger, run: str, path: Path) -> BundleVerification:
    """Write the bundle of a run and return its verification. Signs a tree head that covers the run first.

    Raises ConfigurationError when the run is not recorded, TamperedError when its evidence does not verify.
    """
    ledger.sign_head()
    heads = ledger.heads.read(ledger.trust)
    with stored_evidence(ledger.engine) as source:
        contents = gather(source, heads, ledger.store, ledger.trust, run)
    write_contents(contents, ledger.store, path)
    try:
        checked = verify_bundle(read_bundle(path), ledger.trust)
        if not checked.verified:
            raise TamperedError(f"run {run} is not exported, its evidence does not verify: {checked.first}")
    except TamperedError:
        path.unlink()
        raise
    return checked


def write_contents(contents: Contents, store: BlobStore, path: Path) -> None:
    """Write a bundle from what was gathered, as it is."""
    paths = {digest: store.path(digest) for digest in contents.manifest.blobs}
    write_bundle(path, contents.manifest, contents.head, contents.entries, contents.keys, paths)


def gather(source: StoredEvidence, heads: HeadsRead, store: BlobStore, trust: Trust, run: str) -> Contents:
    """Collect what is recorded of ``run``, as it is stored, with the newest tree head. Nothing is verified here."""
    newest = heads.newest
    wanted = set(run_sequences(source.connection, run))
    if newest is None or not wanted:
        raise ConfigurationError(f"run {run!r} is not recorded here; qualify evidence list shows the runs")
    after = min(wanted) - 1
    before = source.entry(after)
    chain, inside = [], []
    for entry in takewhile(lambda entry: entry.sequence <= newest.size, source.entries(after)):
        chain.append(entry.envelope_sha256)
        if entry.sequence in wanted:
            inside.append(entry)
    facts = list(_readable(inside, trust))
    blobs, withheld = _blobs(facts, store)
    manifest = Manifest(
        format=FORMAT,
        ledger=source.ledger,
        run=run,
        after=after,
        root=before.hash if before is not None else genesis_hash(source.ledger),
        chain=tuple(chain),
        entries=tuple(entry.sequence for entry in inside),
        blobs=blobs,
        withheld=tuple(sorted(withheld)),
    )
    keys = {key.keyid: key for fact in facts for key in fact.signers}
    return Contents(manifest, heads.signed[newest.size].envelope, tuple(inside), tuple(keys.values()))


def run_sequences(connection: Connection, run: str) -> list[int]:
    """Return the entries that speak of a run: its results, receipts and decisions, and people's words on its commit."""
    row = connection.execute(select(models.runs.c.commit).where(models.runs.c.run == run)).one_or_none()
    if row is None:
        return []
    own = [models.workload_results, models.receipts, models.decisions]
    queries = [select(table.c.sequence).where(table.c.run == run) for table in own]
    words = [models.approvals, models.permissions]
    queries += [select(table.c.sequence).where(table.c.commit == row.commit) for table in words]
    results = select(models.workload_results.c.sequence).where(models.workload_results.c.run == run)
    digests = select(models.artifacts.c.sha256).where(models.artifacts.c.sequence.in_(results))
    queries.append(select(models.tombstones.c.sequence).where(models.tombstones.c.sha256.in_(digests)))
    return sorted({sequence for query in queries for sequence in connection.scalars(query)})


def import_bundle(ledger: Ledger, bundle: Bundle, signer: CryptoSigner) -> Imported:
    """Record a bundle's envelopes as they were signed, in their order; what is recorded already is passed over.

    Withheld and removed blobs are covered by a tombstone of this pipeline, which says where they stayed. Raises
    TamperedError when the bundle does not verify under the keys trusted here; nothing is recorded then.
    """
    checked = verify_bundle(bundle, ledger.trust)
    if not checked.verified:
        raise TamperedError(f"{bundle.path} is not imported, it does not verify: {checked.first}")
    _store_blobs(bundle, ledger.store)
    new = ledger.unrecorded(bundle.envelopes.values())
    absent = _absent_blobs((authenticate(envelope, ledger.trust) for envelope in new), ledger.store)
    envelopes = list(new)
    if absent:
        reason = f"withheld from the bundle of run {bundle.manifest.run} of ledger {bundle.manifest.ledger}"
        tombstone = Tombstone(blobs=tuple(sorted(absent)), reason=reason, removed_at=utc_now())
        envelopes.append(sign(statement(tombstone), signer))
    entries = ledger.append_all(envelopes) if envelopes else ()
    ledger.sign_head()
    return Imported(checked, entries, len(bundle.envelopes) - len(new))


def _store_blobs(bundle: Bundle, store: BlobStore) -> None:
    names = {blob_name(digest): digest for digest in bundle.manifest.blobs}
    with opened(bundle.path) as archive:
        for member, content in members(archive):
            if member.name in names and not store.has(names[member.name]):
                stored = store.put_chunks(iter(lambda content=content: content.read(_CHUNK), b""))  # type: ignore[misc]
                if stored != names[member.name]:
                    raise TamperedError(f"{bundle.path} changed while it was read; copy it and import the copy")


def _absent_blobs(facts: Iterable[Authentic], store: BlobStore) -> set[str]:
    return {digest for fact in facts for digest, _ in fact.read.blobs if not store.has(digest)}


def _readable(entries: Sequence[Entry], trust: Trust) -> Iterable[Authentic]:
    for entry in entries:
        try:
            yield authenticate(entry.envelope, trust)
        except InvalidEvidence:  # the bundle's own verification names it
            continue


def _blobs(facts: Iterable[Authentic], store: BlobStore) -> tuple[dict[str, int], set[str]]:
    """Return the blobs to bring, with sizes, and the private ones to withhold."""
    digests: set[str] = set()
    private: set[str] = set()
    for fact in facts:
        digests.update(digest for digest, _ in fact.read.blobs)
        if isinstance(fact.read.fact, WorkloadResult):
            private.update(one.sha256 for one in fact.read.fact.artifacts if one.private)
    brought = {digest for digest in digests - private if store.has(digest)}
    return {digest: store.path(digest).stat().st_size for digest in brought}, private & digests
