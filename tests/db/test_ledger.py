"""The ledger on both databases: append-only, chained, all or none."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from db import models
from db.engine import reading, writing
from db.ledger import Ledger, RecordingError
from qualification.evidence.chain import entry_hash, genesis_hash
from qualification.evidence.findings import Code, InvalidEvidence
from qualification.evidence.signing import sign
from qualification.evidence.statements import statement
from qualification.records import TreeHead
from tests import facts
from tests.databases import Workplace

CHANGES = (
    "UPDATE ledger SET hash = hash",
    "UPDATE ledger SET envelope = envelope WHERE sequence = 2",
    "DELETE FROM ledger",
    "DELETE FROM ledger WHERE sequence = 3",
    "UPDATE ledger_identity SET ledger = 'other'",
    "DELETE FROM ledger_identity",
    "INSERT INTO ledger SELECT sequence + 9, hash, previous_hash, genesis_hash, envelope FROM ledger, ledger_identity",
    "INSERT INTO ledger SELECT 0, hash, previous_hash, genesis_hash, envelope FROM ledger, ledger_identity",
)
ONLY = {
    "sqlite": (
        "REPLACE INTO ledger SELECT * FROM ledger WHERE sequence = 1",
        "UPDATE OR REPLACE ledger SET sequence = 2",
    ),
    "postgresql": ("TRUNCATE ledger", "TRUNCATE ledger_identity", "TRUNCATE ledger, runs CASCADE"),
}


def test_entries_are_numbered_from_one_and_chained_from_the_genesis_of_the_ledger(workplace: Workplace) -> None:
    first, second = workplace.record(facts.result(), facts.receipt())
    (third,) = workplace.record(facts.decision())
    assert [entry.sequence for entry in (first, second, third)] == [1, 2, 3]
    assert first.previous_hash == genesis_hash(workplace.ledger.identity)
    assert (second.previous_hash, third.previous_hash) == (first.hash, second.hash)
    assert third.hash == entry_hash(3, second.hash, third.envelope_sha256)
    assert workplace.verify().verified


def test_the_stored_bytes_are_the_signed_bytes(workplace: Workplace) -> None:
    envelope = sign(statement(facts.receipt(), facts.subject()), workplace.signer)
    entry = workplace.ledger.append(envelope)
    with reading(workplace.engine) as connection:
        assert connection.execute(select(models.ledger.c.envelope)).scalar_one() == envelope == entry.envelope


def test_no_statement_changes_what_is_recorded(workplace: Workplace) -> None:
    workplace.record(facts.result(), facts.receipt(), facts.decision())
    kind = workplace.url.get_backend_name()
    for change in CHANGES + ONLY[kind]:
        with pytest.raises(DBAPIError, match="append-only"), workplace.engine.begin() as connection:
            connection.exec_driver_sql(change)
    assert workplace.verify().verified


def test_several_facts_are_recorded_all_or_none(workplace: Workplace) -> None:
    good = sign(statement(facts.receipt(), facts.subject()), workplace.signer)
    with pytest.raises(InvalidEvidence) as raised:
        workplace.ledger.append_all([good, good.replace(b'"sig":"', b'"sig":"AAAA')])
    assert raised.value.code is Code.ENVELOPE or raised.value.code is Code.SIGNATURE
    assert workplace.verify().size == 0


def test_the_same_signed_fact_is_recorded_once(workplace: Workplace) -> None:
    (entry,) = workplace.record(facts.receipt())
    with pytest.raises(RecordingError, match="already, at sequence 1"):
        workplace.ledger.append(entry.envelope)
    again = sign(statement(facts.receipt("run-2"), facts.subject()), workplace.signer)
    with pytest.raises(RecordingError, match="recorded already"):
        workplace.ledger.append_all([again, again])
    assert workplace.verify().size == 1


def test_a_result_whose_artifact_is_not_stored_is_refused(workplace: Workplace) -> None:
    with pytest.raises(RecordingError, match="not stored; store it first"):
        workplace.record(facts.result(artifacts=[facts.artifact(b"never stored")]))
    assert workplace.verify().size == 0


def test_a_tree_head_is_no_entry(workplace: Workplace) -> None:
    head = TreeHead(ledger=workplace.ledger.identity, size=0, root="0" * 64, signed_at=facts.STAMP)
    with pytest.raises(RecordingError, match="kept apart"):
        workplace.record(head)


def test_a_write_that_fails_late_leaves_nothing(workplace: Workplace) -> None:
    workplace.record(facts.result())
    with pytest.raises(ZeroDivisionError), writing(workplace.engine) as connection:
        connection.execute(models.receipts.insert().values(_receipt_row(9)))
        raise ZeroDivisionError
    assert workplace.verify().verified


def test_facts_of_many_kinds_verify_and_stay_verified_after_more(workplace: Workplace) -> None:
    for number in range(3):
        content = f"steps of run {number}".encode()
        workplace.store.put(content)
        workplace.record(
            facts.result(f"run-{number}", artifacts=[facts.artifact(content)]), facts.receipt(f"run-{number}")
        )
        workplace.record(facts.decision(f"run-{number}"))
        workplace.ledger.sign_head()
        assert workplace.verify().verified
    assert workplace.verify(since_head=True).checked_after == 9
    shown = workplace.verify()
    assert (shown.size, shown.head, shown.blobs, shown.first) == (9, 9, 4, None)


def test_a_ledger_that_lost_every_head_is_told_from_a_new_one(workplace: Workplace) -> None:
    workplace.record(facts.receipt())
    assert workplace.verify().head == 0
    for path in workplace.ledger.heads.folder.iterdir():
        path.unlink()
    shown = workplace.verify()
    assert shown.first is not None
    assert shown.first.code is Code.TREE_HEAD_MISSING


def test_a_head_is_signed_only_for_a_ledger_that_extends_the_newest(workplace: Workplace) -> None:
    workplace.record(facts.receipt())
    ahead = replace(workplace.ledger.sign_head(), size=2)
    workplace.ledger.heads.write(ahead, workplace.signer, workplace.ledger.trust)
    with pytest.raises(InvalidEvidence) as raised:
        workplace.ledger.sign_head()
    assert raised.value.code is Code.REWRITTEN


def _receipt_row(sequence: int) -> dict[str, object]:
    return {
        "sequence": sequence,
        "run": "run-9",
        "attempt": 1,
        "commit": facts.COMMIT,
        "status": "CLEAN",
        "timed_out": False,
        "recovered": False,
        "taken_at": facts.STAMP,
    }


def test_a_first_entry_by_someone_else_while_a_new_ledger_is_opened_is_no_alarm(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_first_head = Ledger._sign_first_head

    def after_someone_else(ledger: Ledger) -> None:
        monkeypatch.setattr(Ledger, "_sign_first_head", sign_first_head)
        workplace.record(facts.receipt("someone else"))
        for path in ledger.heads.folder.iterdir():
            path.unlink()
        sign_first_head(ledger)

    monkeypatch.setattr(Ledger, "_sign_first_head", after_someone_else)
    opened = Ledger(workplace.engine, workplace.store, workplace.trust, workplace.signer)
    assert opened.sign_head().size == 1
    assert workplace.verify().verified
