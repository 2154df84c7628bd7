"""Where facts are recorded: what qualification asks of a ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from qualification.evidence.authentic import Authentic
from qualification.evidence.chain import Entry
from qualification.evidence.findings import Finding


class EvidenceSink(Protocol):
    """Takes signed envelopes and never gives one up."""

    def append(self, envelope: bytes) -> Entry:
        """Record one envelope durably and return its entry."""
        ...

    def append_all(self, envelopes: Sequence[bytes]) -> tuple[Entry, ...]:
        """Record several envelopes, all or none."""
        ...


class EvidenceSource(Protocol):
    """One unchanging view of a ledger and of what was derived from it, for verification."""

    ledger: str
    """The ledger's id."""

    def entries(self, after: int) -> Iterator[Entry]:
        """Yield the stored entries numbered above ``after``, in order."""
        ...

    def entry(self, sequence: int) -> Entry | None:
        """Return one stored entry."""
        ...

    def protections(self) -> Sequence[Finding]:
        """Return what is wrong with triggers and views."""
        ...

    def disagreements(self, facts: Sequence[tuple[int, Authentic]], after: int, until: int | None) -> Sequence[Finding]:
        """Compare the projected rows of the entries after ``after`` with what ``facts`` make of them.

        ``until`` is the last of these entries, None at the end of the ledger, beyond which no row may lie.
        """
        ...
