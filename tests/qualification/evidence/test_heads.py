"""Tree heads: kept apart, few, extended step by step; and the clock that judges them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from db.check import verify_database
from db.ledger import Ledger
from db.source import stored_evidence
from qualification.evidence.findings import Code, InvalidEvidence
from qualification.evidence.heads import KEPT_HEADS
from qualification.evidence.signing import pipeline_signer
from qualification.evidence.trust import Trust
from qualification.evidence.verify import CLOCK_TOLERANCE, verify
from tests import facts
from tests.databases import Workplace


def test_each_head_extends_the_one_before_and_the_newest_are_kept(sqlite_workplace: Workplace) -> None:
    sizes = []
    for number in range(KEPT_HEADS + 4):
        sqlite_workplace.record(facts.receipt(f"run-{number}"))
        sizes.append(sqlite_workplace.ledger.sign_head().size)
    assert sizes == list(range(1, KEPT_HEADS + 5))
    kept = sorted(int(path.stem) for path in sqlite_workplace.ledger.heads.folder.iterdir())
    assert kept == sizes[-KEPT_HEADS:]
    assert sqlite_workplace.ledger.sign_head().size == sizes[-1]
    assert sqlite_workplace.verify().verified


def test_only_what_follows_the_newest_head_is_checked_when_asked(sqlite_workplace: Workplace) -> None:
    sqlite_workplace.record(facts.result("run-0"), facts.receipt("run-0"))
    sqlite_workplace.ledger.sign_head()
    sqlite_workplace.record(facts.receipt("run-1"))
    with sqlite_workplace.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE receipts SET status = 'DIRTY' WHERE sequence = 2")
    shown = sqlite_workplace.verify(since_head=True)
    assert (shown.verified, shown.checked_after, shown.size) == (True, 2, 3)
    assert not sqlite_workplace.verify().verified
    with sqlite_workplace.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE receipts SET status = 'DIRTY' WHERE sequence = 3")
    found = sqlite_workplace.verify(since_head=True).first
    assert found is not None
    assert (found.code, found.sequence) == (Code.PROJECTION, 3)


@pytest.mark.parametrize(
    ("behind", "found"), [(timedelta(hours=1), False), (CLOCK_TOLERANCE + timedelta(minutes=1), True)]
)
def test_a_clock_that_was_set_back_is_noticed(sqlite_workplace: Workplace, behind: timedelta, found: bool) -> None:
    sqlite_workplace.record(facts.receipt())
    sqlite_workplace.ledger.sign_head()
    trust = Trust.load(sqlite_workplace.trust)
    heads = sqlite_workplace.ledger.heads.read(trust)
    with stored_evidence(sqlite_workplace.engine) as source:
        shown = verify(source, sqlite_workplace.store, trust, heads, now=datetime.now(UTC) - behind)
    assert [one.code for one in shown.findings] == ([Code.CLOCK_BEHIND] if found else [])


def test_a_folder_of_trust_that_is_new_to_a_ledger_says_so_until_told(workplace: Workplace, tmp_path: Path) -> None:
    workplace.record(facts.receipt())
    workplace.ledger.sign_head()
    second = tmp_path / "second machine"
    second.mkdir()
    (second / "keys").symlink_to(workplace.trust / "keys")
    ledger = Ledger(workplace.engine, workplace.store, second, pipeline_signer(second))
    found = verify_database(workplace.engine, workplace.store, second).first
    assert found is not None
    assert found.code is Code.TREE_HEAD_MISSING
    with pytest.raises(InvalidEvidence, match="sign-head --first"):
        ledger.sign_head()
    assert ledger.sign_head(first=True).size == 1
    assert verify_database(workplace.engine, workplace.store, second).verified


def test_a_head_that_is_let_go_while_it_is_read_is_no_alarm(
    sqlite_workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_workplace.record(facts.receipt())
    sqlite_workplace.ledger.sign_head()
    heads = sqlite_workplace.ledger.heads
    listed = [*heads.folder.iterdir(), heads.folder / "000000000000.json"]
    (heads.folder / "000000000000.json").unlink()
    monkeypatch.setattr(heads, "_files", lambda: sorted(set(listed)))
    read = heads.read(sqlite_workplace.ledger.trust)
    assert (read.findings, list(read.signed)) == ([], [1])
