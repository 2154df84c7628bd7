"""One consistent view of the stored evidence, in the form that verification walks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, select

from db import models, protections
from db.engine import reading
from db.projections import compare, known_runs, project
from qualification.evidence.authentic import Authentic
from qualification.evidence.chain import Entry, genesis_hash
from qualification.evidence.findings import Code, Finding, InvalidEvidence

_PAGE = 500
_COLUMNS = (
    models.ledger.c.sequence,
    models.ledger.c.previous_hash,
    models.ledger.c.hash,
    models.ledger.c.envelope_sha256,
    models.ledger.c.envelope,
)


class StoredEvidence:
    """The ledger and its projections as one connection sees them."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ledger = read_identity(connection)
        self._runs: set[str] | None = None

    def entries(self, after: int) -> Iterator[Entry]:
        """Yield the stored entries numbered above ``after``, in order."""
        while True:
            query = select(*_COLUMNS).order_by(models.ledger.c.sequence).limit(_PAGE)
            if after:
                query = query.where(models.ledger.c.sequence > after)
            page = self.connection.execute(query).all()
            yield from (_entry(row) for row in page)
            if len(page) < _PAGE:
                return
            after = page[-1].sequence

    def entry(self, sequence: int) -> Entry | None:
        """Return one stored entry."""
        row = self.connection.execute(select(*_COLUMNS).where(models.ledger.c.sequence == sequence)).one_or_none()
        return None if row is None else _entry(row)

    def protections(self) -> Sequence[Finding]:
        """Return what is wrong with the triggers."""
        return protections.check(self.connection)

    def disagreements(self, facts: Sequence[tuple[int, Authentic]], after: int, until: int | None) -> Sequence[Finding]:
        """Compare projected rows with what ``facts`` make of them."""
        if self._runs is None:
            self._runs = known_runs(self.connection, until=after) if after else set()
        expected = project(((sequence, authentic.read) for sequence, authentic in facts), self._runs)
        return list(compare(self.connection, expected, after, until))


@contextmanager
def stored_evidence(engine: Engine) -> Iterator[StoredEvidence]:
    """Give one unchanging view of the database, for as long as the block runs."""
    with reading(engine) as connection:
        yield StoredEvidence(connection)


def read_identity(connection: Connection) -> str:
    """Return the ledger's id. Raises InvalidEvidence when the database has lost it."""
    found = connection.execute(select(models.identity.c.ledger, models.identity.c.genesis_hash)).all()
    if len(found) != 1 or not isinstance(found[0].ledger, str):
        raise InvalidEvidence(Code.DATABASE, "the database has lost the identity of its ledger")
    if found[0].genesis_hash != genesis_hash(found[0].ledger):
        raise InvalidEvidence(Code.DATABASE, "the identity of the ledger and its genesis hash do not belong together")
    return found[0].ledger


def _entry(row: Any) -> Entry:  # noqa: ANN401 - a row of any result
    """Take a row as it is; what is not of its column's type (SQLite holds anything) becomes empty and cannot verify."""
    sequence, previous, current, digest, envelope = row
    if not isinstance(sequence, int):
        raise InvalidEvidence(Code.DATABASE, "the ledger holds a row whose sequence is no number")
    return Entry(
        sequence=sequence,
        previous_hash=previous if isinstance(previous, str) else "",
        hash=current if isinstance(current, str) else "",
        envelope_sha256=digest if isinstance(digest, str) else "",
        envelope=envelope if isinstance(envelope, bytes) else b"",
    )
