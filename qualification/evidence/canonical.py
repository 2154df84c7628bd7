"""Canonical bytes: RFC 8785 JSON without floats, and the SHA-256 digests taken over them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import rfc8785

from qualification.evidence.findings import Code, InvalidEvidence

LARGEST_INTEGER = 2**53 - 1
"""The largest integer that every reader of JSON holds exactly."""

_ENCODER = msgspec.json.Encoder(order="sorted")


def canonical_bytes(value: object) -> bytes:
    """Return the RFC 8785 bytes of a record or of plain JSON values.

    Raises TypeError for a float: measured values are integers or decimal strings, so that their bytes are unique.
    Raises ValueError for what JSON cannot hold exactly: integers of more than 53 bits, text with lone surrogates.
    """
    plain = msgspec.to_builtins(value)
    _require_exact(plain)
    try:
        sorted_json = _ENCODER.encode(plain)
        if sorted_json.isascii() and b"\\" not in sorted_json:
            return (
                sorted_json  # without escapes and beyond ASCII nothing, sorted JSON is canonical, and 50 times faster
            )
        return rfc8785.dumps(plain)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise ValueError(f"no canonical form: {error}") from None


def parse_canonical(payload: bytes) -> object:
    """Return the value whose canonical bytes are exactly ``payload``.

    Raises InvalidEvidence for anything else: other spacing, order or escapes, a key given twice, a float, NaN.
    """
    try:
        value: object = msgspec.json.decode(payload)
        canonical = canonical_bytes(value)
    except (msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
        raise InvalidEvidence(Code.NOT_CANONICAL, f"is not canonical JSON: {error}") from None
    if canonical != payload:
        raise InvalidEvidence(Code.NOT_CANONICAL, "is JSON, but not in its canonical form (RFC 8785)")
    return value


def sha256(data: bytes) -> str:
    """Return the SHA-256 of ``data`` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def evidence_root(digests: Sequence[str]) -> str:
    """Return the one digest that stands for a run's evidence: SHA-256 over the canonical array of ``digests``.

    ``digests`` are those of the run's stored workload results and receipts, in ledger order.
    """
    return sha256(canonical_bytes(list(digests)))


def is_root_of_first(root: str, digests: Sequence[str]) -> bool:
    """Whether ``root`` stands for the first so many of ``digests``: what there was when it was taken."""
    return any(evidence_root(digests[:count]) == root for count in range(len(digests), -1, -1))


def _require_exact(value: object) -> None:
    if isinstance(value, str):
        return
    if isinstance(value, dict):
        for item in value.values():
            _require_exact(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _require_exact(item)
    elif isinstance(value, float):
        raise TypeError(f"{value!r} is a float; record an integer or a decimal string")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{value} has more than 53 bits; record a decimal string")
