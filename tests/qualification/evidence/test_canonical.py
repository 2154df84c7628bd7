"""Canonical bytes against RFC 8785, its reference implementation, and everything that must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from qualification.evidence.canonical import (
    LARGEST_INTEGER,
    canonical_bytes,
    evidence_root,
    is_root_of_first,
    parse_canonical,
    sha256,
)
from qualification.evidence.findings import Code, InvalidEvidence
from tests.tamper.judges import tool

SCALARS = st.none() | st.booleans() | st.integers(-LARGEST_INTEGER, LARGEST_INTEGER) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@given(VALUES)
def test_the_bytes_are_those_of_the_reference_implementation(value: object) -> None:
    made = canonical_bytes(value)
    assert made == rfc8785.dumps(value)  # type: ignore[arg-type]
    assert parse_canonical(made) == value
    assert tool.canonical(value) == made


@given(st.dictionaries(st.text(alphabet=st.characters(max_codepoint=0x7F)), st.integers(0, 9), max_size=6))
def test_plain_ascii_takes_the_fast_way_to_the_same_bytes(value: dict[str, int]) -> None:
    assert canonical_bytes(value) == rfc8785.dumps(value)  # type: ignore[arg-type]


def test_keys_are_ordered_by_utf16_as_the_rfc_says() -> None:
    assert canonical_bytes({"\ufb33": 1, "😂": 2, "ö": 3, "1": 4}) == '{"1":4,"ö":3,"😂":2,"\ufb33":1}'.encode()


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf"), {"a": [1, {"b": 0.5}]}, (1, 2.0)])
def test_a_float_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="is a float"):
        canonical_bytes(value)


@pytest.mark.parametrize("value", [2**53, -(2**53), {"a": 2**64}, "\ud800", {"\udfff": 1}])
def test_what_json_cannot_hold_exactly_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"no canonical form|53 bits|utf-8|encode|surrogate"):
        canonical_bytes(value)


REFUSED = [
    b'{"a":1,"a":1}',
    b'{"a":1,"b":2,"a":3}',
    b'{"b":1,"a":2}',
    b'{"a": 1}',
    b'{"a":1}\n',
    b"\xef\xbb\xbf{}",
    b"1.0",
    b"1e2",
    b"-0",
    b"01",
    b"NaN",
    b"Infinity",
    b"1e999",
    b"9007199254740993",
    b'"\\u0061"',
    b'"\\/"',
    b'"\\u000A"',
    b'"\\ud800"',
    b'"\xff"',
    b"{}{}",
    b"",
    b"[" * 100_000,
]


@pytest.mark.parametrize("parse", [parse_canonical, lambda data: tool.parse(data, "it")], ids=["ours", "tool"])
@pytest.mark.parametrize("payload", REFUSED, ids=[str(payload[:24]) for payload in REFUSED])
def test_anything_but_the_canonical_bytes_is_refused(payload: bytes, parse: Callable[[bytes], object]) -> None:
    with pytest.raises((InvalidEvidence, tool.BadError)) as raised:
        parse(payload)
    assert Code.NOT_CANONICAL.value in str(raised.value) or getattr(raised.value, "code", None) is Code.NOT_CANONICAL


@given(VALUES.map(lambda value: json.dumps(value, indent=1).encode()))
def test_pretty_json_is_read_only_when_it_happens_to_be_canonical(payload: bytes) -> None:
    try:
        value = parse_canonical(payload)
    except InvalidEvidence:
        return
    assert canonical_bytes(value) == payload


def test_a_root_stands_for_digests_in_their_order() -> None:
    digests = [sha256(bytes([number])) for number in range(3)]
    root = evidence_root(digests)
    assert root != evidence_root(digests[::-1])
    assert is_root_of_first(root, [*digests, "later"])
    assert not is_root_of_first(root, digests[:2])
    assert is_root_of_first(evidence_root([]), [])
