"""Canonical bytes: RFC 8785 JSON without floats, and the SHA-256 digests taken over them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NoReturn

import msgspec
import rfc8785

from qualification.evidence.findings import Code, InvalidEvidence


def canonical_bytes(value: object) -> bytes:
    """Return the RFC 8785 bytes of a record or of plain JSON values.

    Raises TypeError for a float: measured values are integers or decimal strings, so that their bytes are unique.
    Raises ValueError for what JSON cannot hold exactly: integers of more than 53 bits, text with lone surrogates.
    """
    plain = msgspec.to_builtins(value)
    _refuse_floats(plain)
    try:
        return rfc8785.dumps(plain)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise ValueError(f"no canonical form: {error}") from None


def parse_canonical(payload: bytes) -> object:
    """Return the value whose canonical bytes are exactly ``payload``.

    Raises InvalidEvidence for anything else: other spacing, order or escapes, a key given twice, a float, NaN.
    """
    try:
        value = json.loads(payload, object_pairs_hook=_unique, parse_float=_refuse, parse_constant=_refuse)
        canonical = canonical_bytes(value)
    except (ValueError, RecursionError) as error:
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


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return value


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")


def _refuse_floats(value: object) -> None:
    if isinstance(value, float):
        raise TypeError(f"{value!r} is a float; record an integer or a decimal string")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)
