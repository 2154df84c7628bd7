"""Envelopes and statements forged: by strangers, by people, and by whoever holds the pipeline's key."""

from __future__ import annotations

import base64
import json
import string
import unicodedata
from collections.abc import Callable

from securesystemslib.signer import CryptoSigner

from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.findings import Code
from qualification.evidence.signing import sign
from tests.tamper.kinds import STEPS, kind
from tests.tamper.site import Site, forged, payload_of


def _replace(site: Site, sequence: int, change: Callable[[bytes], bytes]) -> None:
    site.rechain(lambda envelopes: [change(envelopes[0]), *envelopes[1:]], keep=sequence - 1)


def _payload(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda envelope: forged(envelope, change(payload_of(envelope)))


@kind(Code.SIGNATURE, "envelope", 1)
def verdict_changed(site: Site) -> None:
    _replace(site, 1, _payload(lambda payload: payload.replace(b"FAILED", b"PASSED")))


@kind(Code.SIGNATURE, "envelope", 12)
def approval_moved_to_another_commit(site: Site) -> None:
    _replace(site, 12, _payload(lambda payload: payload.replace(b"4f0c4f0c", b"aaaaaaaa")))


@kind(Code.SIGNATURE, "envelope", 5)
def blob_row_and_chain_replaced_together(site: Site) -> None:
    old, new = site.blob(STEPS).name, site.blob(b"better steps").name
    _replace(site, 5, _payload(lambda payload: payload.replace(old.encode(), new.encode())))


@kind(Code.SIGNER_UNKNOWN, "envelope", 1)
def signed_again_with_another_key(site: Site) -> None:
    stranger = CryptoSigner.generate_ed25519()
    changed = lambda envelope: sign(payload_of(envelope).replace(b"FAILED", b"PASSED"), stranger)  # noqa: E731
    _replace(site, 1, changed)


@kind(Code.SIGNATURE, "envelope", 2)
def signed_by_another_key_under_the_same_id(site: Site) -> None:
    stranger = CryptoSigner.generate_ed25519(keyid=site.signer.public_key.keyid)
    _replace(site, 2, lambda envelope: sign(payload_of(envelope), stranger))


@kind(Code.SIGNATURE, "envelope", 2)
def signed_by_the_right_key_under_another_id(site: Site) -> None:
    _replace(site, 2, lambda envelope: envelope.replace(site.signer.public_key.keyid.encode(), b"0" * 64))


@kind(Code.SIGNER_NOT_PERMITTED, "envelope", 1)
def result_signed_by_an_approver(site: Site) -> None:
    _replace(site, 1, lambda envelope: sign(payload_of(envelope), site.alice))


@kind(Code.SIGNER_NOT_PERMITTED, "envelope", 3)
def approval_signed_by_the_pipeline(site: Site) -> None:
    _replace(site, 3, lambda envelope: sign(payload_of(envelope), site.signer))


@kind(Code.SIGNER_NOT_PERMITTED, "envelope", 3)
def word_of_alice_signed_by_bob(site: Site) -> None:
    _replace(site, 3, lambda envelope: sign(payload_of(envelope), site.bob))


@kind(Code.ENVELOPE, "envelope", 2)
def same_signature_twice(site: Site) -> None:
    def twice(envelope: bytes) -> bytes:
        content = json.loads(envelope)
        return canonical_bytes({**content, "signatures": content["signatures"] * 2})

    _replace(site, 2, twice)


@kind(Code.ENVELOPE, "envelope", 2)
def payload_type_changed(site: Site) -> None:
    _replace(site, 2, lambda envelope: envelope.replace(b"vnd.in-toto+json", b"vnd.other.x+json"))


@kind(Code.ENVELOPE, "envelope", 2)
def envelope_emptied(site: Site) -> None:
    _replace(site, 2, lambda _: b"")


@kind(Code.NOT_CANONICAL, "envelope", 2)
def envelope_with_other_spacing(site: Site) -> None:
    _replace(site, 2, lambda envelope: envelope.replace(b'","', b'", "'))


@kind(Code.NOT_CANONICAL, "envelope", 2)
def envelope_with_a_field_more(site: Site) -> None:
    _replace(site, 2, lambda envelope: canonical_bytes({**json.loads(envelope), "note": "seen"}))


@kind(Code.NOT_CANONICAL, "envelope", 2)
def base64_twin(site: Site) -> None:
    """The last character before the padding holds bits that decode to nothing."""

    def twin(envelope: bytes) -> bytes:
        content = json.loads(envelope)
        signature = content["signatures"][0]
        text = signature["sig"]
        twins = (f"{text[:-3]}{letter}==" for letter in string.ascii_letters + string.digits + "+/")
        signature["sig"] = next(one for one in twins if one != text and base64.b64decode(one) == base64.b64decode(text))
        return canonical_bytes(content)

    _replace(site, 2, twin)


@kind(Code.SIGNATURE, "envelope", 5)
def unicode_twin_of_a_name(site: Site) -> None:
    _replace(site, 5, _payload(lambda payload: unicodedata.normalize("NFD", payload.decode()).encode()))


@kind(Code.NOT_CANONICAL, "envelope", 2)
def payload_that_is_not_canonical_signed_by_the_pipeline(site: Site) -> None:
    _replace(site, 2, lambda envelope: sign(payload_of(envelope).replace(b'","', b'", "'), site.signer))


@kind(Code.NOT_CANONICAL, "envelope", 2)
def payload_with_a_key_twice_signed_by_the_pipeline(site: Site) -> None:
    twice = lambda payload: payload.replace(b'"attempt":1', b'"attempt":1,"attempt":1')  # noqa: E731
    _replace(site, 2, lambda envelope: sign(twice(payload_of(envelope)), site.signer))


@kind(Code.STATEMENT, "envelope", 2)
def unknown_predicate_signed_by_the_pipeline(site: Site) -> None:
    _replace(site, 2, lambda envelope: sign(payload_of(envelope).replace(b":v1", b":v9"), site.signer))


@kind(Code.STATEMENT, "envelope", 1)
def result_that_contradicts_its_verdict_signed_by_the_pipeline(site: Site) -> None:
    passed = lambda payload: payload.replace(b'"result":"FAILED"', b'"result":"PASSED"')  # noqa: E731
    _replace(site, 1, lambda envelope: sign(passed(payload_of(envelope)), site.signer))


@kind(Code.STATEMENT, "envelope", 3)
def subject_that_contradicts_its_predicate(site: Site) -> None:
    moved = lambda payload: payload.replace(b'"gitCommit":"4f', b'"gitCommit":"5f')  # noqa: E731
    _replace(site, 3, lambda envelope: sign(moved(payload_of(envelope)), site.alice))


@kind(Code.BLOB_MISSING, "blob", 5)
def tombstone_forged_for_a_removed_blob(site: Site) -> None:
    stranger = CryptoSigner.generate_ed25519()
    digest = site.blob(STEPS).name
    site.blob(STEPS).unlink()
    note = lambda payload: payload.replace(payload[payload.index(b'["') + 2 :][:64], digest.encode())  # noqa: E731
    site.rechain(lambda envelopes: [*envelopes, sign(note(payload_of(envelopes[10])), stranger)])
