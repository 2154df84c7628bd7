"""Query tables made from ledger entries: a pure function from one statement to its rows.

``qualify db rebuild`` deletes the rows and makes them again, byte for byte; verification compares them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from sqlalchemy import Boolean, Column, ColumnElement, Connection, Integer, Table, select, type_coerce

from db import models
from qualification.evidence.findings import Code, Finding, InvalidEvidence
from qualification.evidence.statements import PERMIT, Read
from qualification.records import (
    AdoptionDecision,
    Approval,
    Figure,
    Lease,
    Publication,
    Receipt,
    Tombstone,
    TreeHead,
    WorkloadResult,
)

Row = dict[str, Any]
Rows = Mapping[Table, list[Row]]

_PULL_REQUEST = re.compile(r"(?:refs/)?pull/(\d{1,9})/(?:head|merge)")


def project(facts: Iterable[tuple[int, Read]], known_runs: set[str]) -> Rows:
    """Return the rows of consecutive entries, by table and in order of sequence.

    ``known_runs`` holds the runs that earlier entries already made a row for; new ones are added to it.
    """
    rows: dict[Table, list[Row]] = defaultdict(list)
    for sequence, read in facts:
        for table, row in _rows(read, known_runs):
            rows[table].append({"sequence": sequence, **row})
    return rows


def insert(connection: Connection, rows: Rows) -> None:
    """Write projected rows."""
    for table, values in rows.items():
        connection.execute(table.insert(), values)


def clear(connection: Connection) -> None:
    """Delete every projected row."""
    for table in models.PROJECTIONS:
        connection.execute(table.delete())


def known_runs(connection: Connection, runs: Iterable[str] | None = None, until: int | None = None) -> set[str]:
    """Return which of ``runs`` have a row already, or all that have one up to the sequence ``until``."""
    query = select(models.runs.c.run)
    if runs is not None:
        query = query.where(models.runs.c.run.in_(list(runs)))
    if until is not None:
        query = query.where(models.runs.c.sequence <= until)
    return set(connection.execute(query).scalars())


def compare(connection: Connection, expected: Rows, after: int, until: int | None) -> Iterator[Finding]:
    """Yield a finding for each entry whose stored rows are not ``expected``, among those from ``after`` (exclusive).

    ``until`` is inclusive; None means that no row may lie beyond the expected ones. ``after`` 0: none before them.
    """
    for table in models.PROJECTIONS:
        names = [column.name for column in table.columns]
        wanted = {_key(row): tuple(row[name] for name in names) for row in expected.get(table, ())}
        query = select(*(_raw(connection, column) for column in table.columns))
        if after:
            query = query.where(table.c.sequence > after)
        if until is not None:
            query = query.where(table.c.sequence <= until)
        at = names.index("position") if "position" in names else None
        for stored in connection.execute(query.order_by(*table.primary_key.columns)):
            key = (stored[0], 0 if at is None else stored[at])
            if not isinstance(stored[0], int):
                raise InvalidEvidence(Code.DATABASE, f"table {table.name} holds a row whose sequence is no number")
            if wanted.pop(key, None) != tuple(stored):
                yield _differs(table, stored[0], "holds a row that disagrees with its ledger entry")
        for sequence, _ in wanted:
            yield _differs(table, sequence, "misses a row of its ledger entry")


def _raw(connection: Connection, column: Column[Any]) -> ColumnElement[Any]:
    """Read a truth value of SQLite as the number that is stored: only 0 and 1 are right, any other would read true."""
    plain = connection.dialect.name == "sqlite" and isinstance(column.type, Boolean)
    return type_coerce(column, Integer) if plain else column


def _key(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["sequence"], row.get("position", 0)


def _differs(table: Table, sequence: int, text: str) -> Finding:
    numbered = sequence if sequence > 0 else None  # a row may claim an entry that no ledger can have
    return Finding(code=Code.PROJECTION, place=f"table {table.name}", text=text, sequence=numbered)


def _rows(read: Read, known_runs: set[str]) -> Iterator[tuple[Table, Row]]:
    match read.fact:
        case WorkloadResult() as result:
            yield from _result_rows(result, read, known_runs)
        case Receipt() as receipt:
            yield (
                models.receipts,
                {
                    "run": receipt.run,
                    "attempt": receipt.attempt,
                    "commit": read.commit,
                    "status": receipt.status.value,
                    "exit_code": receipt.exit_code,
                    "timed_out": receipt.timed_out,
                    "recovered": receipt.recovered,
                    "taken_at": receipt.taken_at,
                    "reason": receipt.reason,
                },
            )
        case AdoptionDecision() as made:
            yield from _decision_rows(made, read)
        case Approval() as approval:
            table = models.permissions if approval.action == PERMIT else models.approvals
            yield table, msgspec.structs.asdict(approval)
        case Tombstone() as tombstone:
            for position, digest in enumerate(tombstone.blobs):
                yield (
                    models.tombstones,
                    {
                        "position": position,
                        "sha256": digest,
                        "reason": tombstone.reason,
                        "removed_at": tombstone.removed_at,
                    },
                )
        case Publication():
            yield models.publications, msgspec.structs.asdict(read.fact)
        case TreeHead():
            return


def _result_rows(result: WorkloadResult, read: Read, known_runs: set[str]) -> Iterator[tuple[Table, Row]]:
    if result.run not in known_runs:
        known_runs.add(result.run)
        yield models.runs, _run_row(result, read)
    yield (
        models.workload_results,
        {
            "run": result.run,
            "attempt": result.attempt,
            "workload": result.workload,
            "commit": read.commit,
            "ground": result.ground.value,
            "card": result.card,
            "policy": result.policy.name,
            "policy_sha256": result.policy.sha256,
            "rules_sha256": result.rules_sha256,
            "environment_sha256": result.environment_sha256,
            "verdict": result.verdict.value,
            "started_at": result.started_at,
            "duration_ms": result.duration_ms,
            "exit_code": result.exit_code,
            "reason": result.reason,
        },
    )
    for position, criterion in enumerate(result.criteria):
        yield (
            models.criteria,
            {
                "position": position,
                "name": criterion.name,
                "verdict": criterion.verdict.value,
                "basis": criterion.basis.value,
                "measured": _text(criterion.measured),
                "threshold": _text(criterion.threshold),
                "direction": criterion.direction,
                "unit": criterion.unit,
                "reason": criterion.reason,
            },
        )
    for position, artifact in enumerate(result.artifacts):
        yield models.artifacts, {"position": position, **msgspec.structs.asdict(artifact)}
    for position, lease in enumerate(result.leases):
        yield models.devices, {"position": position, "run": result.run, "at": result.started_at, **_lease(lease)}


def _run_row(result: WorkloadResult, read: Read) -> Row:
    source = read.source
    assert source is not None
    return {
        "run": result.run,
        "commit": source.commit,
        "tree": source.tree,
        "repository": source.repository,
        "reference": source.reference,
        "pull_request": _pull_request(source.reference),
        "dirty": source.dirty,
        "ground": result.ground.value,
        "policy": result.policy.name,
        "policy_sha256": result.policy.sha256,
        "rules_sha256": result.rules_sha256,
        "started_at": result.started_at,
    }


def _decision_rows(made: AdoptionDecision, read: Read) -> Iterator[tuple[Table, Row]]:
    yield (
        models.decisions,
        {
            "run": made.run,
            "commit": read.commit,
            "decision": made.decision.value,
            "row": made.row,
            "evidence_root": made.evidence_root,
            "rules_sha256": made.rules_sha256,
            "ledger_size": made.ledger_size,
            "ledger_root": made.ledger_root,
            "decided_at": made.decided_at,
        },
    )
    for position, reason in enumerate(made.reasons):
        yield models.reasons, {"position": position, "reason": reason}


def _lease(lease: Lease) -> Row:
    return {"resource": lease.resource, "token": lease.token}


def _pull_request(reference: str | None) -> int | None:
    found = _PULL_REQUEST.fullmatch(reference or "")
    return int(found[1]) if found else None


def _text(figure: Figure) -> str | None:
    return None if figure is None else str(figure)
