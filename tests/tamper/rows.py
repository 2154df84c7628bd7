"""Rows of the ledger edited, dropped, swapped, and rewritten with hashes computed anew."""

from __future__ import annotations

import json

from db.engine import sqlite_url
from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.chain import genesis_hash
from qualification.evidence.findings import Code
from qualification.evidence.signing import sign
from tests.tamper.kinds import kind, sql
from tests.tamper.site import Site, payload_of, without_constraints

OTHER_LEDGER = "f47ac10b-58cc-4372-a567-0e02b2c3d479"


@kind(Code.ENTRY_HASH, "ledger", 5)
def envelope_edited(site: Site) -> None:
    sql(site, "UPDATE ledger SET envelope = CAST(replace(envelope, 'eyJ', 'eyK') AS BLOB) WHERE sequence = 5")


@kind(Code.ENTRY_HASH, "ledger", 6)
def hash_edited(site: Site) -> None:
    sql(site, f"UPDATE ledger SET hash = '{'a' * 64}' WHERE sequence = 6")


@kind(Code.ENTRY_HASH, "ledger", 6)
def hash_emptied(site: Site) -> None:
    sql(site, "UPDATE ledger SET hash = '' WHERE sequence = 6")


@kind(Code.PREVIOUS_HASH, "ledger", 6)
def previous_hash_edited(site: Site) -> None:
    sql(site, f"UPDATE ledger SET previous_hash = '{'b' * 64}' WHERE sequence = 6")


@kind(Code.ENTRY_HASH, "ledger", 7)
def envelope_digest_edited(site: Site) -> None:
    sql(site, f"UPDATE ledger SET envelope_sha256 = '{'c' * 64}' WHERE sequence = 7")


@kind(Code.ENTRY_HASH, "ledger", 5)
def envelope_stored_as_text(site: Site) -> None:
    sql(site, "UPDATE ledger SET envelope = CAST(envelope AS TEXT) WHERE sequence = 5")


@kind(Code.SEQUENCE, "ledger", 6)
def middle_row_deleted(site: Site) -> None:
    sql(site, "DELETE FROM ledger WHERE sequence = 6")


@kind(Code.SEQUENCE, "ledger", 1)
def first_row_deleted(site: Site) -> None:
    sql(site, "DELETE FROM ledger WHERE sequence = 1")


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
    sql(site, f"UPDATE ledger_identity SET ledger = '{OTHER_LEDGER}'")


@kind(Code.PREVIOUS_HASH, "ledger", 1)
def identity_and_genesis_replaced(site: Site) -> None:
    genesis = genesis_hash(OTHER_LEDGER)
    sql(site, f"UPDATE ledger_identity SET ledger = '{OTHER_LEDGER}', genesis_hash = '{genesis}'")


def facts_of_a_fork(site: Site) -> list[bytes]:
    """Return envelopes that are properly signed but were never in this ledger, as another ledger's would be."""
    changed = payload_of(site.entries()[8].envelope).replace(b"run-2", b"run-3")
    return [sign(changed, site.signer)]
