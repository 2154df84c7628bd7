"""Every kind of tampering that must be found: what is done, and the code, place and sequence that verification gives.

Unless it says otherwise, the intruder can write the database and the blobs, drop triggers and compute hashes, but holds
no key and cannot touch the trust folder.
"""

from __future__ import annotations

import base64
import json
import os
import string
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

from securesystemslib.signer import CryptoSigner

from db.engine import sqlite_url
from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.chain import genesis_hash
from qualification.evidence.findings import Code
from qualification.evidence.signing import sign
from tests.tamper.site import PRIVATE, SUFFIX, Site, forged, payload_of, without_constraints

OTHER_LEDGER = "f47ac10b-58cc-4372-a567-0e02b2c3d479"
STEPS = b"steps" + SUFFIX + b"run-1"


Apply = Callable[[Site], None]


class Kind(NamedTuple):
    """One kind of tampering, and how it must be found."""

    name: str
    apply: Apply
    code: Code
    place: str
    sequence: int | None


CORPUS: list[Kind] = []


def kind(code: Code, place: str, sequence: int | None = None) -> Callable[[Apply], Apply]:
    def register(apply: Apply) -> Apply:
        CORPUS.append(Kind(apply.__name__, apply, code, place, sequence))
        return apply

    return register


def _sql(site: Site, *statements: str) -> None:
    with site.unprotected() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


# Edits of single rows


@kind(Code.ENTRY_HASH, "ledger", 5)
def envelope_edited(site: Site) -> None:
    _sql(site, "UPDATE ledger SET envelope = CAST(replace(envelope, 'eyJ', 'eyK') AS BLOB) WHERE sequence = 5")


@kind(Code.ENTRY_HASH, "ledger", 6)
def hash_edited(site: Site) -> None:
    _sql(site, f"UPDATE ledger SET hash = '{'a' * 64}' WHERE sequence = 6")


@kind(Code.ENTRY_HASH, "ledger", 6)
def hash_emptied(site: Site) -> None:
    _sql(site, "UPDATE ledger SET hash = '' WHERE sequence = 6")


@kind(Code.PREVIOUS_HASH, "ledger", 6)
def previous_hash_edited(site: Site) -> None:
    _sql(site, f"UPDATE ledger SET previous_hash = '{'b' * 64}' WHERE sequence = 6")


@kind(Code.ENTRY_HASH, "ledger", 7)
def envelope_digest_edited(site: Site) -> None:
    _sql(site, f"UPDATE ledger SET envelope_sha256 = '{'c' * 64}' WHERE sequence = 7")


@kind(Code.ENTRY_HASH, "ledger", 5)
def envelope_stored_as_text(site: Site) -> None:
    _sql(site, "UPDATE ledger SET envelope = CAST(envelope AS TEXT) WHERE sequence = 5")


@kind(Code.SEQUENCE, "ledger", 6)
def middle_row_deleted(site: Site) -> None:
    _sql(site, "DELETE FROM ledger WHERE sequence = 6")


@kind(Code.SEQUENCE, "ledger", 1)
def first_row_deleted(site: Site) -> None:
    _sql(site, "DELETE FROM ledger WHERE sequence = 1")


@kind(Code.ENTRY_HASH, "ledger", 5)
def rows_swapped(site: Site) -> None:
    five, six = site.entries()[4:6]
    with site.unprotected() as connection:
        for sequence, entry in ((5, six), (6, five)):
            changed = (f"{sequence:064x}", entry.envelope, sequence)
            update = "UPDATE ledger SET envelope_sha256 = ?, envelope = ? WHERE sequence = ?"
            connection.exec_driver_sql(update, changed)


@kind(Code.SEQUENCE, "ledger", 6)
def sequence_duplicated(site: Site) -> None:
    with site.unprotected() as connection:
        without_constraints(connection)
        connection.exec_driver_sql("INSERT INTO ledger SELECT * FROM ledger WHERE sequence = 6")


# Rewriting with hashes computed anew


@kind(Code.TRUNCATED, "ledger", 12)
def tail_cut(site: Site) -> None:
    site.rechain(lambda envelopes: envelopes[:-2])


@kind(Code.REWRITTEN, "ledger", 4)
def failed_result_dropped_and_chain_rewritten(site: Site) -> None:
    site.rechain(lambda envelopes: envelopes[1:])


@kind(Code.REWRITTEN, "ledger", 13)
def rewritten_from_row_nine(site: Site) -> None:
    site.rechain(lambda envelopes: [envelopes[1], envelopes[0], *envelopes[2:]], keep=8)


@kind(Code.REWRITTEN, "ledger", 8)
def one_of_two_signatures_stripped(site: Site) -> None:
    def strip(envelopes: list[bytes]) -> list[bytes]:
        content = json.loads(envelopes[0])
        return [canonical_bytes({**content, "signatures": content["signatures"][:1]}), *envelopes[1:]]

    site.rechain(strip, keep=6)


@kind(Code.REWRITTEN, "ledger", 13)
def forked_after_the_last_but_one_head(site: Site) -> None:
    other = facts_of_a_fork(site)
    site.rechain(lambda envelopes: [*other, *envelopes[len(other) :]], keep=8)


@kind(Code.TREE_HEAD_MISSING, "tree heads")
def good_entries_moved_to_a_new_ledger(site: Site) -> None:
    kept = [entry.envelope for entry in site.entries()[4:]]
    (site.home / "evidence.db").unlink()
    site.engine.dispose()
    new = Site(site.home, site.trust / ".." / "elsewhere", sqlite_url(site.home / "evidence.db"))
    new.trust.mkdir()
    for name in ("keys", "people.toml"):
        (new.trust / name).symlink_to((site.trust / name).resolve())
    new.ledger.append_all(kept[:3])
    new.engine.dispose()


@kind(Code.REPEATED, "ledger", 14)
def old_decision_recorded_again(site: Site) -> None:
    site.rechain(lambda envelopes: [*envelopes, envelopes[7]])


@kind(Code.TRUNCATED, "ledger", 9)
def old_database_brought_back(site: Site) -> None:
    site.rechain(lambda envelopes: envelopes[:8])


@kind(Code.DATABASE, "evidence")
def identity_replaced(site: Site) -> None:
    _sql(site, f"UPDATE ledger_identity SET ledger = '{OTHER_LEDGER}'")


@kind(Code.PREVIOUS_HASH, "ledger", 1)
def identity_and_genesis_replaced(site: Site) -> None:
    genesis = genesis_hash(OTHER_LEDGER)
    _sql(site, f"UPDATE ledger_identity SET ledger = '{OTHER_LEDGER}', genesis_hash = '{genesis}'")


# Forged envelopes


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


# Blobs


@kind(Code.BLOB_ALTERED, "blob", 5)
def blob_replaced(site: Site) -> None:
    site.blob(STEPS).write_bytes(STEPS.replace(b"1", b"2"))


@kind(Code.BLOB_MISSING, "blob", 5)
def blob_deleted(site: Site) -> None:
    site.blob(STEPS).unlink()


@kind(Code.BLOB_MISSING, "blob", 9)
def private_original_deleted_without_tombstone(site: Site) -> None:
    site.blob(PRIVATE).unlink()


@kind(Code.BLOB_ALTERED, "blob", 5)
def blob_partly_written(site: Site) -> None:
    os.truncate(site.blob(STEPS), len(STEPS) // 2)


@kind(Code.BLOB_UNSAFE, "blob", 5)
def blob_replaced_by_a_link_to_the_same_bytes(site: Site) -> None:
    path = site.blob(STEPS)
    path.rename(site.home / "elsewhere")
    path.symlink_to(site.home / "elsewhere")


@kind(Code.BLOB_UNSAFE, "blob", 5)
def blob_replaced_by_a_folder(site: Site) -> None:
    path = site.blob(STEPS)
    path.unlink()
    path.mkdir()


@kind(Code.BLOB_UNSAFE, "blob", 5)
def blob_replaced_by_a_pipe(site: Site) -> None:
    path = site.blob(STEPS)
    path.unlink()
    os.mkfifo(path)


@kind(Code.BLOB_UNSAFE, "blob 'run.sh'")
def stray_file_among_the_blobs(site: Site) -> None:
    (site.store.folder / "run.sh").write_text("echo")


@kind(Code.BLOB_UNSAFE, "blob")
def upper_case_twin_of_a_blob(site: Site) -> None:
    path = site.blob(STEPS)
    path.with_name(path.name.upper()).write_bytes(STEPS)


@kind(Code.BLOB_ALTERED, "blob")
def unrecorded_blob_with_wrong_name(site: Site) -> None:
    (site.store.folder / ("d" * 64)).write_bytes(b"not these bytes")


# Projections, protections, the file


@kind(Code.PROJECTION, "table workload_results", 1)
def projected_verdict_edited(site: Site) -> None:
    _sql(site, "UPDATE workload_results SET verdict = 'PASSED' WHERE sequence = 1")


@kind(Code.PROJECTION, "table approvals", 12)
def projected_expiry_edited(site: Site) -> None:
    _sql(site, "UPDATE approvals SET expires_at = '2099-01-01T00:00:00Z' WHERE sequence = 12")


@kind(Code.PROJECTION, "table decision_reasons", 4)
def projected_row_deleted(site: Site) -> None:
    _sql(site, "DELETE FROM decision_reasons WHERE sequence = 4 AND position = 0")


@kind(Code.PROJECTION, "table decisions", 99)
def projected_row_invented(site: Site) -> None:
    invented = 'SELECT 99, run, "commit", \'adopted\', "row", evidence_root, rules_sha256, ledger_size, ledger_root'
    _sql(site, f"INSERT INTO decisions {invented}, decided_at FROM decisions WHERE sequence = 4")


@kind(Code.PROTECTION, "trigger ledger_refuses_update")
def trigger_dropped(site: Site) -> None:
    with site.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER ledger_refuses_update")


@kind(Code.PROTECTION, "trigger ledger_refuses_delete")
def trigger_weakened(site: Site) -> None:
    with site.engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER ledger_refuses_delete")
        weak = "BEFORE DELETE ON ledger WHEN OLD.sequence = 1 BEGIN SELECT RAISE(ABORT, 'ledger is append-only'); END"
        connection.exec_driver_sql(f"CREATE TRIGGER ledger_refuses_delete {weak}")


@kind(Code.PROTECTION, "unique column ledger.envelope_sha256")
def unique_columns_lifted(site: Site) -> None:
    with site.unprotected() as connection:
        without_constraints(connection)


@kind(Code.PROTECTION, "view why_held")
def view_replaced(site: Site) -> None:
    with site.engine.begin() as connection:
        connection.exec_driver_sql("DROP VIEW why_held")
        connection.exec_driver_sql("CREATE VIEW why_held AS SELECT 'nothing is held' AS reason")


@kind(Code.DATABASE, "evidence")
def table_dropped(site: Site) -> None:
    with site.engine.begin() as connection:
        connection.exec_driver_sql("DROP VIEW metric_history")
        connection.exec_driver_sql("DROP TABLE criteria")


@kind(Code.DATABASE, "evidence")
def database_partly_written(site: Site) -> None:
    site.engine.dispose()
    path = site.home / "evidence.db"
    os.truncate(path, path.stat().st_size // 3)


# The trust folder, by someone who can write it but has no private key


@kind(Code.TREE_HEAD, "tree head 000000000013.json")
def tree_head_edited(site: Site) -> None:
    path = site.ledger.heads.folder / "000000000013.json"
    path.write_bytes(path.read_bytes().replace(b'"sig":"', b'"sig":"A'))


@kind(Code.TREE_HEAD, "tree head 000000000014.json")
def tree_head_renamed_to_another_size(site: Site) -> None:
    path = site.ledger.heads.folder / "000000000013.json"
    path.rename(path.with_name("000000000014.json"))


@kind(Code.TREE_HEAD_MISSING, "tree heads")
def tree_heads_deleted(site: Site) -> None:
    for path in site.ledger.heads.folder.iterdir():
        path.unlink()


@kind(Code.KEY_ALTERED, "evidence")
def public_key_swapped(site: Site) -> None:
    (path,) = (site.trust / "keys").glob("*.json")
    content = json.loads(path.read_bytes())
    content["keyval"]["public"] = CryptoSigner.generate_ed25519().public_key.keyval["public"]
    path.write_bytes(canonical_bytes(content))


@kind(Code.KEY_EXPIRED, "envelope", 1)
def key_expired_before_it_signed(site: Site) -> None:
    (path,) = (site.trust / "keys").glob("*.json")
    path.write_bytes(canonical_bytes({**json.loads(path.read_bytes()), "expires_at": "2026-11-30T11:59:59Z"}))


@kind(Code.SIGNER_UNKNOWN, "envelope", 1)
def public_key_deleted(site: Site) -> None:
    (path,) = (site.trust / "keys").glob("*.json")
    path.unlink()


def facts_of_a_fork(site: Site) -> list[bytes]:
    """Return envelopes that are properly signed but were never in this ledger, as another ledger's would be."""
    changed = payload_of(site.entries()[8].envelope).replace(b"run-2", b"run-3")
    return [sign(changed, site.signer)]
