"""The hash chain: each entry's hash covers its number, the hash before it, and the digest of its stored bytes.

The two kinds of hash start with different words, so that none can stand for the other.
"""

from __future__ import annotations

import hashlib

from qualification.evidence.canonical import sha256
from qualification.records import Count, Record, Sha256

_GENESIS = b"trainer-rank-qualification ledger genesis v1\0"
_ENTRY = b"trainer-rank-qualification ledger entry v1\0"


class Entry(Record, frozen=True):
    """One entry: its number (from 1), the hashes of the chain, and the envelope's bytes exactly as they were signed."""

    sequence: Count
    previous_hash: Sha256
    hash: Sha256
    envelope_sha256: Sha256
    envelope: bytes


def genesis_hash(ledger: str) -> str:
    """Return the hash that the first entry of the ledger of this id follows; also the root of the empty ledger."""
    return sha256(_GENESIS + ledger.encode())


def entry_hash(sequence: int, previous_hash: str, envelope_sha256: str) -> str:
    """Return the hash of the entry of this number whose envelope has this digest."""
    digest = hashlib.sha256(_ENTRY)
    digest.update(sequence.to_bytes(8, "big"))
    digest.update(bytes.fromhex(previous_hash))
    digest.update(bytes.fromhex(envelope_sha256))
    return digest.hexdigest()


def link(sequence: int, previous_hash: str, envelope: bytes) -> Entry:
    """Return the entry that puts ``envelope`` after ``previous_hash``."""
    digest = sha256(envelope)
    return Entry(
        sequence=sequence,
        previous_hash=previous_hash,
        hash=entry_hash(sequence, previous_hash, digest),
        envelope_sha256=digest,
        envelope=envelope,
    )
