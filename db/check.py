"""Verify the evidence of one database against its blobs and the trust folder."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

from db.engine import reading
from db.source import read_identity, stored_evidence
from qualification.evidence.blobs import BlobStore
from qualification.evidence.heads import TreeHeads
from qualification.evidence.trust import Trust
from qualification.evidence.verify import Verification, verify


def verify_database(engine: Engine, store: BlobStore, trust_folder: Path, *, since_head: bool = False) -> Verification:
    """Walk every entry, blob, projection, trigger and tree head; ``since_head``: what follows the newest tree head.

    May run while others write. Raises InvalidEvidence when the database is too damaged to be walked.
    """
    trust = Trust.load(trust_folder)
    with reading(engine) as connection:
        ledger = read_identity(connection)
    heads = TreeHeads(trust_folder, ledger).read(trust)
    with stored_evidence(engine) as source:
        return verify(source, store, trust, heads, since_head=since_head)
