"""Remove the private originals of a run for good: first a signed tombstone in the ledger, then the files."""

from __future__ import annotations

from securesystemslib.signer import CryptoSigner
from sqlalchemy import select

from db import models
from db.engine import reading
from db.ledger import Ledger
from qualification.errors import ConfigurationError
from qualification.evidence.signing import sign, utc_now
from qualification.evidence.statements import statement
from qualification.records import Tombstone


def remove_private_blobs(ledger: Ledger, run: str, reason: str, signer: CryptoSigner) -> tuple[str, ...]:
    """Remove what ``run`` keeps as private and return the digests; public projections and all records stay.

    Raises ConfigurationError when nothing of the run is private, or all of it is gone already.
    """
    with reading(ledger.engine) as connection:
        results = select(models.workload_results.c.sequence).where(models.workload_results.c.run == run)
        query = select(models.artifacts.c.sha256).where(
            models.artifacts.c.sequence.in_(results), models.artifacts.c.private.is_(True)
        )
        private = sorted({digest for digest in connection.scalars(query) if ledger.store.has(digest)})
    if not private:
        raise ConfigurationError(f"run {run} keeps no private blobs here")
    tombstone = Tombstone(blobs=tuple(private), reason=reason, removed_at=utc_now())
    ledger.append(sign(statement(tombstone), signer))
    ledger.sign_head()
    for digest in private:
        ledger.store.remove(digest)
    return tombstone.blobs
