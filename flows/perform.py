"""One attempt from lease to closed lease. Whatever happens in between, results, receipt and a closed lease follow.

Order is the whole point: assignment written, lease held, source checked out, workloads run, each result recorded,
source retired, receipt taken and recorded, lease closed by what the receipt says. No step is skipped because an
earlier one failed, and nothing is asked of Prefect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from sqlalchemy import func, select

from db.engine import reading
from db.models import workload_results
from flows.candidates import candidates
from flows.progress import Progress
from flows.recorder import Recorder
from flows.recovering import recovery_with
from flows.request import Request
from flows.resolve import Resolved
from flows.workload import result, run_workload
from qualification.assignment import Assignment, save_assignment
from qualification.environment import environment_manifest
from qualification.errors import ConfigurationError, RefusedError
from qualification.execution.attempt import Attempt, host
from qualification.execution.capture import Stamped
from qualification.execution.holding import HeldLeases, WaitCancelled, acquire
from qualification.execution.identity import myself
from qualification.execution.leases import LeaseRequest
from qualification.execution.probes.gpus import GpuReader
from qualification.execution.supervision import Limits
from qualification.home import home
from qualification.locked import LockedPackages
from qualification.providers.choose import provider_for
from qualification.records import Receipt, Verdict, WorkloadResult
from qualification.rules import RulesDocument
from qualification.workloads import devices_needed
from qualification.worktree import create_worktree, retire_worktree

WORKTREES = "worktrees"
RUNS = "runs"


@dataclass
class Performed:
    """What an attempt left in the ledger so far."""

    assignment: Assignment
    results: list[WorkloadResult] = field(default_factory=list)
    receipt: Receipt | None = None


def assign(
    request: Request,
    rules: RulesDocument,
    resolved: Resolved,
    recorder: Recorder,
    run: str,
    locked: LockedPackages | None,
) -> Assignment:
    """Store the documents that a result rests on, and write down what this attempt shall do."""
    number = _next_attempt(recorder, resolved)
    source = resolved.checkout or home() / WORKTREES / f"{run}-{number}"
    assignment = Assignment(
        run=run,
        attempt=number,
        started_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        subject=resolved.subject,
        policy=resolved.policy,
        ground=request.ground,
        workloads=request.workloads,
        rules_sha256=recorder.document(rules.text),
        environment_sha256=recorder.document(environment_manifest(locked)),
        source=str(source),
        store=str(resolved.store) if resolved.store else None,
        packages=str(locked.folder) if locked else None,
        parameters=request.parameters,
        requested_by=request.requested_by,
    )
    recorder.document(resolved.policy_document)
    save_assignment(assignment, attempt_folder(assignment))
    return assignment


def _next_attempt(recorder: Recorder, resolved: Resolved) -> int:
    """Count on from the attempts recorded of this commit and policy, whichever runs they belong to."""
    columns = workload_results.c
    query = select(func.max(columns.attempt)).where(
        columns.commit == resolved.subject.commit, columns.policy == resolved.policy.name
    )
    with reading(recorder.engine) as connection:
        return (connection.execute(query).scalar_one() or 0) + 1


def attempt_folder(assignment: Assignment) -> Path:
    """Return the folder of an attempt's own files."""
    return home() / RUNS / assignment.run / str(assignment.attempt)


def perform(
    assignment: Assignment,
    recorder: Recorder,
    progress: Progress,
    *,
    limits: Limits | None = None,
    priority: int = 0,
    image: str | None = None,
    cancelled: Callable[[], str | None] | None = None,
) -> Performed:
    """Run every workload of an assignment under one lease and return what was recorded.

    An interruption or error is raised again once results, receipt and the closed lease are recorded. A request that is
    cancelled before its lease is recorded too; one that is refused a device leaves nothing.
    """
    done = Performed(assignment)
    with GpuReader() as reader:
        attempt = Attempt(
            run=assignment.run,
            attempt=assignment.attempt,
            folder=attempt_folder(assignment),
            trainer=True,
            worktree=Path(assignment.source) if assignment.store else None,
            reader=reader,
            provider=provider_for(image),
        )
        attempt.announce()
        with suppress(WaitCancelled), _receipted(attempt, done, recorder, progress):
            attempt.held = _lease(assignment, recorder, reader, progress, priority, cancelled)
            attempt.begin()
            if assignment.store is not None:
                create_worktree(Path(assignment.store), assignment.subject, Path(assignment.source))
            for name in assignment.workloads:
                progress.stage("workload", name)
                say = _teller(name, progress)
                found = run_workload(
                    name, assignment, attempt, recorder.blobs, limits=limits, on_event=say, cancelled=cancelled
                )
                _record(done, recorder, found)
                progress.stage("verdict", f"{found.verdict} {name}{f': {found.reason}' if found.reason else ''}")
    return done


def _lease(
    assignment: Assignment,
    recorder: Recorder,
    reader: GpuReader,
    progress: Progress,
    priority: int,
    cancelled: Callable[[], str | None] | None,
) -> HeldLeases:
    recovery = recovery_with(recorder, reader)
    count = devices_needed(assignment.workloads)
    request = LeaseRequest(
        run=assignment.run,
        attempt=assignment.attempt,
        candidates=candidates(assignment.ground, reader, count),
        count=count,
        folder=str(attempt_folder(assignment)),
        host=host(),
        holder=myself(),
        priority=priority,
    )
    held = acquire(
        recovery.store,
        request,
        reader=reader,
        recover=recovery.holding,
        waiting=lambda reason: progress.stage("waiting", reason),
        cancelled=cancelled,
    )
    progress.stage("lease", ", ".join(f"{lease.resource} token {lease.token}" for lease in held.leases))
    return held


@contextmanager
def _receipted(attempt: Attempt, done: Performed, recorder: Recorder, progress: Progress) -> Iterator[None]:
    """Record what is missing, take the receipt, record it, close the lease: after success, error and interruption."""
    try:
        yield
    except BaseException as error:
        if attempt.held is None and isinstance(error, RefusedError | ConfigurationError):
            attempt.withdraw()
            raise
        named = "" if isinstance(error, WaitCancelled) else f": {type(error).__name__}"
        said = f"not finished{named}{f': {error}' if str(error) else ''}"
        try:
            for name in done.assignment.workloads[len(done.results) :]:
                _record(done, recorder, _incomplete(done.assignment, attempt, name, said))
        finally:
            _close(attempt, done, recorder, progress)
        raise
    _close(attempt, done, recorder, progress)


def _close(attempt: Attempt, done: Performed, recorder: Recorder, progress: Progress) -> None:
    if done.assignment.store is not None:
        retire_worktree(Path(done.assignment.store), Path(done.assignment.source))
    done.receipt = attempt.take_receipt()
    recorder.record([done.receipt], done.assignment.subject)
    progress.stage("receipt", f"{done.receipt.status}{f': {done.receipt.reason}' if done.receipt.reason else ''}")
    attempt.close(done.receipt)
    recorder.seal()


def _record(done: Performed, recorder: Recorder, found: WorkloadResult) -> None:
    recorder.record([found], done.assignment.subject)
    done.results.append(found)


def _incomplete(assignment: Assignment, attempt: Attempt, name: str, reason: str) -> WorkloadResult:
    leases = attempt.held.leases if attempt.held else ()
    return result(name, assignment, Verdict.INCOMPLETE, started=datetime.now(UTC), leases=leases, reason=reason[:2000])


def _teller(name: str, progress: Progress) -> Callable[[Stamped], None]:
    def tell(stamped: Stamped) -> None:
        if stamped.event is not msgspec.UNSET:
            said = msgspec.json.decode(stamped.event, type=dict[str, object])
            progress.event(name, str(said.pop("event", "")), said)

    return tell
