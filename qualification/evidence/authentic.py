"""Is this envelope what it says, signed by someone who may say it, at a time when they might?"""

from __future__ import annotations

from typing import NamedTuple

from qualification.evidence.findings import Code, InvalidEvidence
from qualification.evidence.signing import open_envelope
from qualification.evidence.statements import KINDS, Read, read_statement
from qualification.evidence.trust import Trust, TrustedKey
from qualification.records import Approval


class Authentic(NamedTuple):
    """A statement and the keys whose signature counts for it; ``unknown`` are ids of signatures nobody here knows."""

    read: Read
    signers: tuple[TrustedKey, ...]
    unknown: tuple[str, ...]

    @property
    def people(self) -> frozenset[str]:
        """Return the distinct owners of the keys that count: two keys of one person are one."""
        return frozenset(key.owner for key in self.signers)


def authenticate(stored: bytes, trust: Trust) -> Authentic:
    """Verify an envelope's stored bytes down to what the statement in it says. Raises InvalidEvidence.

    A signature counts when its key may sign this kind of statement and was valid at the statement's stamp; at least one
    must count, and a person's word counts only with a signature by that person.
    """
    opened = open_envelope(stored, trust)
    read = read_statement(opened.payload)
    use = KINDS[read.predicate_type].signer
    permitted = tuple(key for key in opened.signers if key.use is use)
    if not permitted:
        owners = ", ".join(key.owner for key in opened.signers)
        raise InvalidEvidence(Code.SIGNER_NOT_PERMITTED, f"is a {read.predicate_type.short} signed by {owners}")
    valid = tuple(key for key in permitted if key.valid_at(read.stamp))
    if not valid:
        raise InvalidEvidence(
            Code.KEY_EXPIRED, f"was signed at {read.stamp}, when the key of {permitted[0].owner} was not valid"
        )
    if isinstance(read.fact, Approval) and read.fact.person not in {key.owner for key in valid}:
        raise InvalidEvidence(
            Code.SIGNER_NOT_PERMITTED, f"is the word of {read.fact.person}, but signed by {valid[0].owner}"
        )
    return Authentic(read, valid, opened.unknown)
