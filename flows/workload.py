"""One workload of an attempt: launch its worker, keep its raw data, and judge it from what trusted code can see."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import msgspec

from flows.raw_data import RawData, collect
from qualification.assignment import Assignment
from qualification.criteria.observation import Observation, understood
from qualification.criteria.thresholds import malformed
from qualification.errors import ConfigurationError
from qualification.evidence.blobs import BlobStore
from qualification.execution.attempt import Attempt
from qualification.execution.capture import Stamped
from qualification.execution.launch import Launched
from qualification.execution.supervision import Ending, Limits
from qualification.execution.supervisor import TRUSTED
from qualification.execution.worker import UNUSABLE, Job
from qualification.figures import Unreadable
from qualification.records import Artifact, Basis, Criterion, Ground, Lease, Verdict, WorkloadResult
from qualification.verdict import fold
from qualification.workloads import processes_of, ranks_needed
from qualification.workloads.recompute import replays

OUTPUT_FOLDER = "output"
SMALL_MODEL = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""On the virtual device: a small model's threads wait for each other longer than they compute."""
_NOT_JUDGED = {
    Ending.START_FAILED: "the worker could not be started",
    Ending.CANCELLED: "cancelled",
    Ending.LEASE_LOST: "lease lost",
    Ending.CALLER_GONE: "the pipeline was killed",
    Ending.SUPERVISOR_LOST: "the supervisor was killed",
    Ending.PROVIDER_FAILED: "the provider could not run the worker to its end",
    Ending.SILENT: "the worker waited for something",
}
"""Endings that say nothing about the policy: the result is INCOMPLETE, whatever the worker had done by then."""
_OVERDUE = (Ending.TIMED_OUT, Ending.CLOSE_TIMED_OUT)


@dataclass(frozen=True)
class Ran:
    """One process of a workload that has ended, and its raw data as stored."""

    launched: Launched
    raw: RawData


def run_workload(
    name: str,
    assignment: Assignment,
    attempt: Attempt,
    blobs: BlobStore,
    *,
    limits: Limits | None = None,
    on_event: Callable[[Stamped], None] | None = None,
    cancelled: Callable[[], str | None] | None = None,
) -> WorkloadResult:
    """Run one workload to its end, whatever that is, and return its result; its raw data are stored by then."""
    started = datetime.now(UTC)
    ran: list[Ran] = []
    earlier: Path | None = None
    for process, (folder, output) in process_folders(attempt.folder, name).items():
        place = str(folder.relative_to(attempt.folder))
        job = attempt.folder / f"{place}.job.json"
        output.mkdir(parents=True, mode=0o700)
        job.write_bytes(msgspec.json.encode(_job(name, process, assignment, output, earlier)))
        launched = attempt.launch(
            job,
            place,
            limits=limits,
            ranks=ranks_needed(name),
            environment=_environment(assignment),
            on_event=on_event,
            cancelled=cancelled,
        )
        ran.append(Ran(launched, collect(launched.folder, output, blobs, process)))  # hashed before the next begins
        earlier = output
        if not launched.outcome.succeeded:
            break
    criteria, verdict, reason = judge(name, assignment, ran)
    return result(
        name,
        assignment,
        verdict,
        started=started,
        criteria=criteria,
        artifacts=tuple(artifact for one in ran for artifact in one.raw.artifacts),
        leases=attempt.held.leases if attempt.held else (),
        duration_ms=sum(one.launched.outcome.duration_ms for one in ran),
        exit_code=ran[-1].launched.outcome.exit_code,
        reason=reason,
        card=attempt.card,
    )


def process_folders(attempt: Path, workload: str) -> dict[str, tuple[Path, Path]]:
    """Return by process of a workload, in their order, its own folder and that of its output."""
    folders = {process: attempt / workload / process for process in processes_of(workload)}
    return {process: (folder, folder / OUTPUT_FOLDER) for process, folder in folders.items()}


def _environment(assignment: Assignment) -> dict[str, str]:
    chosen = dict(SMALL_MODEL) if assignment.ground is Ground.REHEARSAL else {}
    if assignment.packages is not None:
        chosen["PYTHONPATH"] = os.pathsep.join((assignment.packages, str(TRUSTED)))
    return chosen


def result(
    name: str,
    assignment: Assignment,
    verdict: Verdict,
    *,
    started: datetime,
    criteria: tuple[Criterion, ...] = (),
    artifacts: tuple[Artifact, ...] = (),
    leases: tuple[Lease, ...] = (),
    duration_ms: int = 0,
    exit_code: int | None = None,
    reason: str | None = None,
    card: str | None = None,
) -> WorkloadResult:
    """Return the record of one workload of an assignment."""
    return WorkloadResult(
        run=assignment.run,
        attempt=assignment.attempt,
        workload=name,
        ground=assignment.ground,
        policy=assignment.policy,
        rules_sha256=assignment.rules_sha256,
        verdict=verdict,
        criteria=criteria,
        artifacts=artifacts,
        leases=leases,
        environment_sha256=assignment.environment_sha256,
        started_at=started.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        duration_ms=duration_ms,
        exit_code=exit_code,
        reason=reason,
        parameters=assignment.parameters,
        requested_by=assignment.requested_by,
        card=card,
    )


def judge(name: str, assignment: Assignment, ran: Sequence[Ran]) -> tuple[tuple[Criterion, ...], Verdict, str | None]:
    """Return criteria, verdict and reason of one workload; a run that was ended from outside is not judged."""
    outcome = ran[-1].launched.outcome
    if outcome.ending in _NOT_JUDGED:
        return (), Verdict.INCOMPLETE, "; ".join(filter(None, (_NOT_JUDGED[outcome.ending], outcome.reason)))
    observations: list[Observation] = []
    for one in ran:
        observations.append(_observe(name, assignment, one, observations[-1] if observations else None))
    observation = observations[-1]
    if outcome.exit_code == UNUSABLE and (unusable := _unusable(observation)):
        return (), Verdict.INCOMPLETE, unusable  # nothing ran that could be held against the policy
    try:
        criteria = tuple(import_module(f"qualification.criteria.{name}").judge(observation))
        criteria += tuple(filter(None, map(malformed, observations)))[:1]
    except Exception as error:  # a judge that stumbles over a worker's data has judged nothing
        return (), Verdict.INCOMPLETE, f"the criteria could not be computed: {type(error).__name__}: {error}"
    problems = tuple(problem for one in ran for problem in one.raw.problems)
    if problems:  # what was not kept cannot be judged again
        criteria += (Criterion(name="raw_data", verdict=Verdict.INCOMPLETE, basis=Basis.MEASURED, reason=problems[0]),)
    verdict = fold(criteria)
    return criteria, verdict, _reason(outcome.reason, observation, criteria, problems, verdict)


def _observe(name: str, assignment: Assignment, ran: Ran, earlier: Observation | None) -> Observation:
    outcome = ran.launched.outcome
    return Observation(
        workload=name,
        ground=assignment.ground,
        exit_code=outcome.exit_code,
        timed_out=outcome.ending in _OVERDUE,
        events=understood(ran.launched.events()),
        artifacts=ran.raw.files,
        replays=replays(ran.raw.files),
        measured={"duration_ms": outcome.duration_ms, "sweep_ms": outcome.sweep_ms},
        parameters=assignment.parameters,
        earlier=earlier,
    )


def _unusable(observation: Observation) -> str | None:
    """Return what a worker said of a configuration that it could not use."""
    said = (
        event.text("text") for event in observation.of("failure") if event.text("type") == ConfigurationError.__name__
    )
    return next(filter(None, said), None)


def _reason(
    ending: str | None,
    observation: Observation,
    criteria: tuple[Criterion, ...],
    problems: tuple[str, ...],
    verdict: Verdict,
) -> str | None:
    said = [f"the worker said {_said(event.body)}" for event in observation.of("failure")]
    worst = [criterion.reason for criterion in criteria if criterion.verdict is verdict and criterion.reason]
    words = [*filter(None, (ending,)), *said[:1], *problems[:1], *(worst[:1] if verdict is not Verdict.PASSED else ())]
    return "; ".join(words)[:2000] or None


def _said(body: Mapping[str, object] | Unreadable) -> str:
    return "something unreadable" if isinstance(body, Unreadable) else f"{body.get('type')}: {body.get('text')}"


def _job(name: str, process: str, assignment: Assignment, output: Path, earlier: Path | None) -> Job:
    return Job(
        run=assignment.run,
        attempt=assignment.attempt,
        workload=name,
        ground=assignment.ground,
        policy=assignment.policy.name,
        subject=assignment.source,
        output=str(output),
        parameters=assignment.parameters,
        process=process,
        earlier=None if earlier is None else str(earlier),
    )
