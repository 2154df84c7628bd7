"""Record facts about one subject: documents become blobs, facts signed ledger entries, and the ledger gets its head."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Engine

from db.engine import open_for_writing
from db.ledger import Ledger
from qualification.evidence.blobs import BlobStore
from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.chain import Entry
from qualification.evidence.signing import pipeline_signer, sign
from qualification.evidence.statements import Fact, statement
from qualification.home import home, trust
from qualification.records import Subject


class Recorder:
    """The evidence database, the blobs and the pipeline's key, opened for writing."""

    def __init__(self) -> None:
        self.engine: Engine = open_for_writing()
        self.blobs = BlobStore(home())
        self._signer = pipeline_signer(trust())
        self.ledger = Ledger(self.engine, self.blobs, trust(), self._signer)

    def document(self, content: bytes | dict[str, object]) -> str:
        """Store a document, a mapping as its canonical bytes, and return its digest."""
        return self.blobs.put(content if isinstance(content, bytes) else canonical_bytes(content))

    def record(self, facts: Iterable[Fact], subject: Subject | None) -> tuple[Entry, ...]:
        """Sign facts about ``subject`` and append them, all or none; they are on the disk when this returns."""
        return self.ledger.append_all([sign(statement(fact, subject), self._signer) for fact in facts])

    def seal(self) -> None:
        """Sign the tree head of the ledger as it is now, apart from the ledger."""
        self.ledger.sign_head()

    def close(self) -> None:
        """Close the database."""
        self.engine.dispose()
