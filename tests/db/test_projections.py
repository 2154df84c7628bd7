"""Query tables say what the ledger says, in DESIGN's words, and can be made again byte for byte."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from db import models
from db.engine import reading
from db.ledger import rebuild
from qualification.evidence.findings import Code
from qualification.records import Decision, ReceiptStatus, Tombstone, Verdict
from tests import facts
from tests.databases import Workplace


def _rows(workplace: Workplace) -> dict[str, list[tuple[object, ...]]]:
    with reading(workplace.engine) as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key.columns))]
            for table in models.PROJECTIONS
        }


def _fill(workplace: Workplace) -> None:
    workplace.store.put(b"steps")
    for number in range(4):
        run = f"run-{number}"
        workplace.record(
            facts.result(run, artifacts=[facts.artifact(b"steps")]),
            facts.result(run, workload="pressure", verdict=Verdict.INCOMPLETE),
            facts.receipt(run, ReceiptStatus.UNVERIFIED),
            facts.decision(run, answer=Decision.REJECTED),
        )
    workplace.record(Tombstone(blobs=("7a" * 32, "7b" * 32), reason="a year old", removed_at=facts.STAMP))


def test_rows_use_the_words_of_the_design(workplace: Workplace) -> None:
    _fill(workplace)
    rows = _rows(workplace)
    with reading(workplace.engine) as connection:
        assert set(connection.scalars(select(models.workload_results.c.verdict))) == {"PASSED", "INCOMPLETE"}
        assert set(connection.scalars(select(models.receipts.c.status))) == {"UNVERIFIED"}
        assert set(connection.scalars(select(models.decisions.c.decision))) == {"rejected"}
        assert set(connection.scalars(select(models.runs.c.pull_request))) == {17}
        assert set(connection.scalars(select(models.criteria.c.measured))) == {"18", "2.75"}
    counts = {name: len(stored) for name, stored in rows.items() if stored}
    assert counts == {
        "runs": 4, "workload_results": 8, "criteria": 16, "artifacts": 4, "receipts": 4, "device_uses": 8,
        "decisions": 4, "decision_reasons": 8, "tombstones": 2,
    }  # fmt: skip


def test_rebuilding_gives_the_same_rows(workplace: Workplace) -> None:
    _fill(workplace)
    before = _rows(workplace)
    assert rebuild(workplace.engine, workplace.ledger.trust) == 17
    assert _rows(workplace) == before
    assert workplace.verify().verified


@pytest.mark.parametrize(
    ("change", "place", "sequence"),
    [
        ("UPDATE workload_results SET verdict = 'PASSED' WHERE sequence = 2", "table workload_results", 2),
        ("UPDATE decisions SET decision = 'adopted' WHERE sequence = 8", "table decisions", 8),
        ("DELETE FROM criteria WHERE sequence = 5 AND position = 1", "table criteria", 5),
        ("DELETE FROM runs", "table runs", 1),
        ("INSERT INTO decision_reasons VALUES (12, 7, 'added')", "table decision_reasons", 12),
        ("INSERT INTO decision_reasons VALUES (99, 0, 'beyond the ledger')", "table decision_reasons", 99),
        ("INSERT INTO tombstones VALUES (-1, 0, 'x', 'before the ledger', 'x')", "table tombstones", None),
    ],
)
def test_a_row_that_disagrees_is_found_and_rebuilt(
    workplace: Workplace, change: str, place: str, sequence: int | None
) -> None:
    _fill(workplace)
    with workplace.engine.begin() as connection:
        connection.exec_driver_sql(change)
    found = workplace.verify().first
    assert found is not None
    assert (found.code, found.place, found.sequence) == (Code.PROJECTION, place, sequence)
    rebuild(workplace.engine, workplace.ledger.trust)
    assert workplace.verify().verified


def test_a_truth_value_that_is_neither_true_nor_false_is_found(sqlite_workplace: Workplace) -> None:
    sqlite_workplace.record(facts.receipt())
    with sqlite_workplace.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE receipts SET timed_out = 0, recovered = 7")
    found = sqlite_workplace.verify().first
    assert found is not None
    assert found.place == "table receipts"
