"""Blobs, query tables, protections, the database file and the trust folder tampered with."""

from __future__ import annotations

import json
import os

from securesystemslib.signer import CryptoSigner

from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.findings import Code
from tests.tamper.kinds import STEPS, kind, sql
from tests.tamper.site import PRIVATE, Site, without_constraints


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
    sql(site, "UPDATE workload_results SET verdict = 'PASSED' WHERE sequence = 1")


@kind(Code.PROJECTION, "table approvals", 12)
def projected_expiry_edited(site: Site) -> None:
    sql(site, "UPDATE approvals SET expires_at = '2099-01-01T00:00:00Z' WHERE sequence = 12")


@kind(Code.PROJECTION, "table decision_reasons", 4)
def projected_row_deleted(site: Site) -> None:
    sql(site, "DELETE FROM decision_reasons WHERE sequence = 4 AND position = 0")


@kind(Code.PROJECTION, "table decisions", 99)
def projected_row_invented(site: Site) -> None:
    invented = 'SELECT 99, run, "commit", \'adopted\', "row", evidence_root, rules_sha256, ledger_size, ledger_root'
    sql(site, f"INSERT INTO decisions {invented}, decided_at FROM decisions WHERE sequence = 4")


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
