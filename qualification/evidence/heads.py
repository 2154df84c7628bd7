"""Signed tree heads: how long a ledger was, and its hash then; kept under ``$QUALIFY_TRUST``, apart from the ledger.

``heads/<ledger id>/<size>.json`` is a DSSE envelope. A ledger that was cut or rewritten contradicts one of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from securesystemslib.signer import CryptoSigner

from qualification.evidence.authentic import authenticate
from qualification.evidence.chain import genesis_hash, link
from qualification.evidence.files import write_once
from qualification.evidence.findings import Code, Finding, InvalidEvidence
from qualification.evidence.signing import sign, utc_now
from qualification.evidence.sink import EvidenceSource
from qualification.evidence.statements import statement
from qualification.evidence.trust import Trust
from qualification.records import TreeHead

HEADS_FOLDER = "heads"
KEPT_HEADS = 16
"""How many heads are kept. Each new one is signed only after it was seen to extend the newest, so it speaks for all."""

_NAME = re.compile(r"\d{12}\.json")


class SignedHead(NamedTuple):
    """A tree head that verifies, and its stored bytes."""

    head: TreeHead
    envelope: bytes


class HeadsRead(NamedTuple):
    """The heads that verify, by size, and a finding for each file that is none.

    Read them before the view of the ledger is taken: a head signed meanwhile would seem to be ahead of the ledger.
    """

    signed: dict[int, SignedHead]
    findings: list[Finding]

    @property
    def newest(self) -> TreeHead | None:
        """Return the head of the largest size."""
        return self.signed[max(self.signed)].head if self.signed else None


class TreeHeads:
    """The tree heads of one ledger in the trust folder."""

    def __init__(self, trust_folder: Path, ledger: str) -> None:
        self.ledger = ledger
        self.folder = trust_folder / HEADS_FOLDER / ledger

    def read(self, trust: Trust) -> HeadsRead:
        """Read every head."""
        good: dict[int, SignedHead] = {}
        findings = []
        for path in self._files():
            try:
                signed = self._read_one(path, trust)
                good[signed.head.size] = signed
            except FileNotFoundError:  # an old head that another process let go meanwhile
                continue
            except InvalidEvidence as error:
                text = f"{error.text} [{error.code}]"
                findings.append(Finding(code=Code.TREE_HEAD, place=f"tree head {path.name}", text=text))
        return HeadsRead(good, findings)

    def write(self, head: TreeHead, signer: CryptoSigner, trust: Trust) -> bytes:
        """Sign and keep a head that was seen to extend the newest one; return its envelope.

        One of the same size and root is kept as it is. Raises InvalidEvidence (rewritten) when it has another root.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.folder / f"{head.size:012d}.json"
        envelope = sign(statement(head), signer)
        try:
            write_once(path, envelope)
        except FileExistsError:
            kept = self._read_one(path, trust)
            if kept.head.root != head.root:
                raise InvalidEvidence(
                    Code.REWRITTEN, f"the ledger's hash at size {head.size} is not that of the signed head {path}"
                ) from None
            return kept.envelope
        for old in self._files()[:-KEPT_HEADS]:
            old.unlink(missing_ok=True)
        return envelope

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*") if not path.name.startswith("."))

    def _read_one(self, path: Path, trust: Trust) -> SignedHead:
        if not _NAME.fullmatch(path.name) or path.is_symlink():
            raise InvalidEvidence(Code.TREE_HEAD, "is not named as a tree head's file")
        try:
            envelope = path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InvalidEvidence(Code.TREE_HEAD, f"cannot be read ({error.strerror})") from None
        fact = authenticate(envelope, trust).read.fact
        if not isinstance(fact, TreeHead) or (fact.ledger, f"{fact.size:012d}.json") != (self.ledger, path.name):
            raise InvalidEvidence(Code.TREE_HEAD, "is the head of another ledger or size than its name says")
        return SignedHead(fact, envelope)


def next_head(source: EvidenceSource, heads: HeadsRead, *, first: bool = False) -> TreeHead:
    """Return the unsigned head of the ledger as it is now, after walking its chain from the newest head on.

    Raises InvalidEvidence when the ledger does not extend that head, and when it holds entries but no head is known,
    unless this is knowingly the ``first`` one.
    """
    if heads.findings:
        raise InvalidEvidence(heads.findings[0].code, str(heads.findings[0]))
    newest = heads.newest
    size, root = (newest.size, newest.root) if newest else (0, genesis_hash(source.ledger))
    if size and getattr(source.entry(size), "hash", None) != root:
        raise InvalidEvidence(Code.REWRITTEN, f"the ledger's entry {size} is not the one of the signed tree head")
    for entry in source.entries(size):
        if newest is None and not first:
            raise InvalidEvidence(
                Code.TREE_HEAD_MISSING,
                f"no tree head is known of ledger {source.ledger}, which holds entries; if this folder of trust is new "
                "to it, check its entries and run qualify db sign-head --first",
            )
        if entry != link(size + 1, root, entry.envelope):
            raise InvalidEvidence(Code.ENTRY_HASH, f"the ledger's entry {entry.sequence} does not continue its chain")
        size, root = entry.sequence, entry.hash
    return TreeHead(ledger=source.ledger, size=size, root=root, signed_at=utc_now())
