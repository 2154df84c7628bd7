"""The questions people ask of the evidence, as typed functions over the projections. Nothing here writes.

Every function takes a connection from ``db.engine.reading`` and answers from indexes. A page is bounded by ``limit``;
``Filter.before`` goes on below the last run's ``sequence``. Newest first, by ledger order, never by a clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Column, ColumnElement, Connection, Select, Table, func, select

from db.models import (
    approvals,
    artifacts,
    criteria,
    decisions,
    devices,
    ledger,
    reasons,
    receipts,
    runs,
    workload_results,
)
from qualification.errors import ConfigurationError
from qualification.evidence.findings import InvalidEvidence
from qualification.evidence.signing import unverified_payload
from qualification.evidence.statements import read_statement
from qualification.records import Figure, WorkloadResult
from qualification.reporting.lines import (
    ArtifactLine,
    CriterionLine,
    DecisionLine,
    DeviceUse,
    Filter,
    MetricPoint,
    ReceiptLine,
    ResultDetail,
    ResultLine,
    RunDetail,
    RunLine,
    WordLine,
)

LIMIT = 50
_BATCH = 200
_FEW = 500

R = TypeVar("R", bound=msgspec.Struct)


def list_runs(connection: Connection, wanted: Filter | None = None, limit: int = LIMIT) -> list[RunLine]:
    """Return the newest runs that match, with their results, receipts and newest decision."""
    wanted = wanted or Filter()
    found = select(runs.c.sequence).where(*_of_run(wanted))  # numbers first: an index alone can answer and sort them
    if wanted.workload or wanted.verdict or wanted.card or wanted.artifact:
        found = found.where(_with_matching_result(connection, wanted))
    page = _newest(found, runs, wanted.before).limit(limit)
    query = select(runs).where(runs.c.sequence.in_(page)).order_by(runs.c.sequence.desc())
    return _with_facts(connection, _rows(connection, query, runs, RunLine))


def find_run(connection: Connection, name: str | None = None, commit: str | None = None) -> RunLine:
    """Return one run: by its full name or a start of it that only one has, else the newest (of ``commit``, if given).

    Raises ConfigurationError saying what is there instead.
    """
    if name is None:
        newest = list_runs(connection, Filter(commit=commit), 1)
        if not newest:
            raise ConfigurationError(f"no run of commit {commit} is recorded" if commit else "no run is recorded yet")
        return newest[0]
    query = select(runs).where(runs.c.run == name)
    found = _rows(connection, query, runs, RunLine)
    if not found and len(name) >= 4:
        query = select(runs).where(runs.c.run.startswith(name, autoescape=True)).limit(2)
        found = _rows(connection, query, runs, RunLine)
    if len(found) != 1:
        raise ConfigurationError(
            f"run {name!r} is {'ambiguous' if found else 'not recorded'}; qualify evidence list shows the runs"
        )
    return _with_facts(connection, found)[0]


def newer_run(connection: Connection, run: RunLine) -> str | None:
    """Return the newest later run of the same commit and policy with native evidence, or None."""
    query = select(workload_results.c.run).where(
        workload_results.c.commit == run.commit,
        workload_results.c.policy == run.policy,
        workload_results.c.ground == "native",
        workload_results.c.sequence > run.sequence,
        workload_results.c.run != run.run,
    )
    return connection.execute(query.order_by(workload_results.c.sequence.desc()).limit(1)).scalar_one_or_none()


def run_detail(connection: Connection, run: RunLine) -> RunDetail:
    """Return everything recorded of a run, and people's words on its commit."""
    details = [
        ResultDetail(
            result=result,
            criteria=tuple(criteria_of(connection, result.sequence)),
            artifacts=tuple(artifacts_of(connection, result.sequence)),
            parameters=parameters_of(connection, result.sequence),
        )
        for result in run.results
    ]
    return RunDetail(
        run=run,
        results=tuple(details),
        decisions=tuple(decisions_of(connection, run.run)),
        words=tuple(words(connection, commit=run.commit)),
    )


def parameters_of(connection: Connection, sequence: int) -> dict[str, Figure] | None:
    """Return the parameters that the result at this sequence was given, from its envelope; None if unreadable."""
    for _, _, envelope in envelopes(connection, [sequence]):
        with suppress(InvalidEvidence):
            fact = read_statement(unverified_payload(envelope)).fact
            if isinstance(fact, WorkloadResult):
                return fact.parameters
    return None


def criteria_of(connection: Connection, sequence: int) -> list[CriterionLine]:
    """Return the judged figures of the result at this ledger sequence, in the judge's order."""
    query = select(criteria).where(criteria.c.sequence == sequence).order_by(criteria.c.position)
    return _rows(connection, query, criteria, CriterionLine)


def artifacts_of(connection: Connection, sequence: int) -> list[ArtifactLine]:
    """Return the artifacts of the result at this ledger sequence."""
    query = select(artifacts).where(artifacts.c.sequence == sequence).order_by(artifacts.c.position)
    return _rows(connection, query, artifacts, ArtifactLine)


def decisions_of(connection: Connection, run: str) -> list[DecisionLine]:
    """Return every decision recorded of a run, newest first; older ones are kept as they were."""
    query = select(decisions).where(decisions.c.run == run).order_by(decisions.c.sequence.desc())
    return _with_reasons(connection, _rows(connection, query, decisions, DecisionLine))


def latest_result(connection: Connection, policy: str, workload: str) -> ResultLine | None:
    """Return the newest result of a workload under a policy, given by name or digest."""
    query = select(workload_results).where(workload_results.c.workload == workload, _policy(workload_results, policy))
    found = _rows(connection, _newest(query, workload_results, None).limit(1), workload_results, ResultLine)
    return found[0] if found else None


def metric_history(
    connection: Connection, metric: str, workload: str | None = None, policy: str | None = None, limit: int = LIMIT
) -> list[MetricPoint]:
    """Return a figure over commits, newest first, as recorded: a missing measurement is a point without a value."""
    of_figure = ("measured", "unit", "threshold", "verdict")
    columns = [(criteria if name in of_figure else workload_results).c[name] for name in MetricPoint.__struct_fields__]
    joined = criteria.join(workload_results, workload_results.c.sequence == criteria.c.sequence)
    query = select(*columns).select_from(joined).where(criteria.c.name == metric)
    if workload is not None:
        query = query.where(workload_results.c.workload == workload)
    if policy is not None:
        query = query.where(_policy(workload_results, policy))
    query = query.order_by(criteria.c.sequence.desc(), criteria.c.position).limit(limit)
    return [msgspec.convert(row._mapping, MetricPoint) for row in connection.execute(query)]


def device_history(
    connection: Connection, resource: str, since: str | None = None, limit: int = LIMIT
) -> list[DeviceUse]:
    """Return what ran on a device since a UTC stamp, newest first."""
    query = select(devices).where(devices.c.resource == resource)
    if since is not None:
        query = query.where(devices.c.at >= _bound(since))
    query = query.order_by(devices.c.at.desc(), devices.c.sequence.desc()).limit(limit)
    return _rows(connection, query, devices, DeviceUse)


def words(
    connection: Connection,
    commit: str | None = None,
    expiring: tuple[str, str] | None = None,
    limit: int = LIMIT,
) -> list[WordLine]:
    """Return people's words: those on a commit, or the approvals whose expiry lies in a range of UTC stamps.

    Those that expire first come first in the second case, the newest in the first.
    """
    query = select(approvals)
    if commit is not None:
        query = query.where(approvals.c.commit == commit)
    if expiring is not None:
        soonest, latest = expiring
        query = query.where(
            approvals.c.action == "approve", approvals.c.expires_at.between(_bound(soonest), _bound(latest))
        )
        query = query.order_by(approvals.c.expires_at)
    return _rows(connection, query.order_by(approvals.c.sequence.desc()).limit(limit), approvals, WordLine)


def entries_of(connection: Connection, run: str) -> list[tuple[int, str, bytes]]:
    """Return sequence, digest and stored envelope of a run's results and receipts, in ledger order."""
    numbers = [
        *connection.scalars(select(workload_results.c.sequence).where(workload_results.c.run == run)),
        *connection.scalars(select(receipts.c.sequence).where(receipts.c.run == run)),
    ]
    return envelopes(connection, numbers)


def envelopes(connection: Connection, sequences: Iterable[int]) -> list[tuple[int, str, bytes]]:
    """Return sequence, digest and stored envelope of these ledger entries, in ledger order.

    The digest is the envelope's own, not the chain's hash, so that a root taken over it holds in every ledger that the
    envelopes are brought to.
    """
    columns = (ledger.c.sequence, ledger.c.envelope_sha256, ledger.c.envelope)
    found = []
    for batch in _batches(sorted(sequences)):
        query = select(*columns).where(ledger.c.sequence.in_(batch)).order_by(ledger.c.sequence)
        found += [(row.sequence, row.envelope_sha256, bytes(row.envelope)) for row in connection.execute(query)]
    return found


Reading = Callable[[Column[Any]], ColumnElement[Any]]


def _indexed(column: Column[Any]) -> ColumnElement[Any]:
    return column


def _unindexed(column: Column[Any]) -> ColumnElement[Any]:
    """Read a text column so that no index of it is used: where rows are found by another one, on both databases."""
    return func.coalesce(column, "")


def _of_run(wanted: Filter) -> list[ColumnElement[bool]]:
    conditions = []
    for name in ("commit", "pull_request", "ground"):
        if (value := getattr(wanted, name)) is not None:
            conditions.append(runs.c[name] == value)
    return [*conditions, *_of_both(runs, wanted, _indexed)]


def _of_result(wanted: Filter, read: Reading) -> list[ColumnElement[bool]]:
    conditions = [
        read(workload_results.c[name]) == value
        for name in ("commit", "ground", "workload", "verdict", "card")
        if (value := getattr(wanted, name)) is not None
    ]
    return [*conditions, *_of_both(workload_results, wanted, read)]


def _of_both(table: Table, wanted: Filter, read: Reading) -> list[ColumnElement[bool]]:
    conditions = []
    if wanted.policy is not None:
        conditions.append(_policy(table, wanted.policy, read))
    if wanted.since is not None:
        conditions.append(read(table.c.started_at) >= _bound(wanted.since))
    if wanted.until is not None:
        conditions.append(read(table.c.started_at) < _bound(wanted.until))
    return conditions


def _bound(stamp: str) -> str:
    """Return a stamp, or the start of one, as text that orders stored stamps with and without fractions rightly."""
    return stamp.removesuffix("Z")


def _policy(table: Table, policy: str, read: Reading = _indexed) -> ColumnElement[bool]:
    by_digest = len(policy) == 64 and set(policy) <= set("0123456789abcdef")
    return read(table.c.policy_sha256 if by_digest else table.c.policy) == policy


def _with_matching_result(connection: Connection, wanted: Filter) -> ColumnElement[bool]:
    """Return the condition that a run has a matching result, in the form that is quick for how many there are.

    Few matches are looked up first; of many, the newest runs are looked at one by one until the page is full.
    """
    matching = select(workload_results.c.run).where(*_of_result(wanted, _indexed))
    probe = select(1).where(workload_results.c.run == runs.c.run, *_of_result(wanted, _unindexed))
    if wanted.artifact is not None:
        holding = select(artifacts.c.sequence).where(artifacts.c.sha256 == wanted.artifact)
        matching = matching.where(workload_results.c.sequence.in_(holding))
        of_result = artifacts.c.sequence == workload_results.c.sequence
        probe = probe.where(select(1).where(of_result, _unindexed(artifacts.c.sha256) == wanted.artifact).exists())
    found = connection.scalar(select(func.count()).select_from(matching.limit(_FEW + 1).subquery())) or 0
    return runs.c.run.in_(matching) if found <= _FEW else probe.exists()


def _newest(query: Select[tuple[object, ...]], table: Table, below: int | None) -> Select[tuple[object, ...]]:
    bounded = query if below is None else query.where(table.c.sequence < below)
    return bounded.order_by(table.c.sequence.desc())


def _with_facts(connection: Connection, lines: Sequence[RunLine]) -> list[RunLine]:
    """Return the runs with what belongs to them; three queries, however many runs."""
    names = [line.run for line in lines]
    results = _grouped(connection, workload_results, ResultLine, names)
    proofs = _grouped(connection, receipts, ReceiptLine, names)
    made = _grouped(connection, decisions, DecisionLine, names)
    newest = {run: listed[-1] for run, listed in made.items()}
    told = {line.run: line for line in _with_reasons(connection, list(newest.values()))}
    return [
        msgspec.structs.replace(
            line, results=tuple(results[line.run]), receipts=tuple(proofs[line.run]), decision=told.get(line.run)
        )
        for line in lines
    ]


def _grouped(connection: Connection, table: Table, kind: type[R], names: list[str]) -> dict[str, list[R]]:
    grouped: dict[str, list[R]] = defaultdict(list)
    for batch in _batches(names):
        query = select(table).where(table.c.run.in_(batch)).order_by(table.c.sequence)
        for row in _rows(connection, query, table, kind):
            grouped[row.run].append(row)  # type: ignore[attr-defined]  # every kind grouped here names its run
    return grouped


def _with_reasons(connection: Connection, lines: list[DecisionLine]) -> list[DecisionLine]:
    told: dict[int, list[str]] = defaultdict(list)
    for batch in _batches([line.sequence for line in lines]):
        query = select(reasons.c.sequence, reasons.c.reason).where(reasons.c.sequence.in_(batch))
        for row in connection.execute(query.order_by(reasons.c.sequence, reasons.c.position)):
            told[row.sequence].append(row.reason)
    return [msgspec.structs.replace(line, reasons=tuple(told[line.sequence])) for line in lines]


T = TypeVar("T")


def _batches(items: Sequence[T]) -> Iterable[Sequence[T]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


def _rows(connection: Connection, query: Select[tuple[object, ...]], table: Table, kind: type[R]) -> list[R]:
    """Run a query and return its rows as ``kind``, whose fields are columns of ``table`` or have defaults."""
    fields = [name for name in kind.__struct_fields__ if name in table.c]
    chosen = query.with_only_columns(*(table.c[name] for name in fields), maintain_column_froms=True)
    return [kind(**dict(zip(fields, row, strict=True))) for row in connection.execute(chosen)]
