"""What verification can find wrong: one code per kind, and where it was found."""

from __future__ import annotations

from enum import StrEnum

from qualification.errors import TamperedError
from qualification.records import Count, Record


class Code(StrEnum):
    """Kinds of finding. The text of a finding says the rest."""

    SEQUENCE = "sequence"
    PREVIOUS_HASH = "previous-hash"
    ENTRY_HASH = "entry-hash"
    ENVELOPE = "envelope"
    NOT_CANONICAL = "not-canonical"
    STATEMENT = "statement"
    SIGNATURE = "signature"
    SIGNER_UNKNOWN = "signer-unknown"
    SIGNER_NOT_PERMITTED = "signer-not-permitted"
    KEY_EXPIRED = "key-expired"
    KEY_ALTERED = "key-altered"
    BLOB_MISSING = "blob-missing"
    BLOB_ALTERED = "blob-altered"
    BLOB_UNSAFE = "blob-unsafe"
    PROJECTION = "projection"
    PROTECTION = "protection"
    TREE_HEAD_MISSING = "tree-head-missing"
    TREE_HEAD = "tree-head"
    TRUNCATED = "truncated"
    REWRITTEN = "rewritten"
    CLOCK_BEHIND = "clock-behind"
    REPEATED = "repeated"
    DATABASE = "database"
    BUNDLE = "bundle"


EXPLANATIONS = {
    Code.SEQUENCE: "a sequence number is missing, repeated or out of order",
    Code.PREVIOUS_HASH: "an entry does not name the hash of the entry before it",
    Code.ENTRY_HASH: "an entry's hash is not that of its stored bytes",
    Code.ENVELOPE: "the stored bytes are no DSSE envelope, or a key signs twice in it",
    Code.NOT_CANONICAL: "bytes that must be canonical JSON are not",
    Code.STATEMENT: "the signed payload is no statement of a known predicate, or contradicts its own subject",
    Code.SIGNATURE: "no signature of a known key verifies",
    Code.SIGNER_UNKNOWN: "signed by a key that $QUALIFY_TRUST does not hold",
    Code.SIGNER_NOT_PERMITTED: "signed by a known key that may not sign this kind of statement",
    Code.KEY_EXPIRED: "signed outside the time in which its key was valid",
    Code.KEY_ALTERED: "a public key does not have the id that its file claims",
    Code.BLOB_MISSING: "a recorded blob is not there, and no tombstone says that it was removed",
    Code.BLOB_ALTERED: "a blob's bytes do not have the digest that is its name, or not the recorded size",
    Code.BLOB_UNSAFE: "the blob folder holds something that is no regular file named by 64 hex digits",
    Code.PROJECTION: "a row of a query table disagrees with the ledger entry that it was made from",
    Code.PROTECTION: "a trigger or view of the database is missing, altered or switched off",
    Code.TREE_HEAD_MISSING: "the ledger holds entries, but $QUALIFY_TRUST no tree head of it",
    Code.TREE_HEAD: "a tree head in $QUALIFY_TRUST cannot be read or is not signed by a known pipeline key",
    Code.TRUNCATED: "the ledger is shorter than a signed tree head says",
    Code.REWRITTEN: "the ledger's hash at the size of a signed tree head is another one",
    Code.CLOCK_BEHIND: "this machine's clock is behind the newest signed tree head, so expiry cannot be judged",
    Code.REPEATED: "the same signed envelope is recorded a second time",
    Code.DATABASE: "the database file is damaged",
    Code.BUNDLE: "the bundle's members are unsafe, missing, repeated or not what its manifest lists",
}


class Finding(Record, frozen=True):
    """One thing that does not verify. ``place`` names it: ``ledger``, ``blob <digest>``, ``table runs`` ..."""

    code: Code
    place: str
    text: str
    sequence: Count | None = None

    def __str__(self) -> str:
        where = f"sequence {self.sequence}, {self.place}" if self.sequence is not None else self.place
        return f"{where}: {self.text} [{self.code}]"


class InvalidEvidence(TamperedError):  # noqa: N818 - reads as what it is where it is raised
    """Bytes that do not verify; ``code`` is their kind, the text completes "it ..."."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
