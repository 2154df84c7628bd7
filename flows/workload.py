"""One workload of an attempt: launch its worker, keep its raw data, and judge it from what trusted code can see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import msgspec

from flows.raw_data import RawData, collect
from qualification.attempt import Attempt
from qualification.criteria.observation import Observation, understood
from qualification.evidence.blobs import BlobStore
from qualification.execution.capture import Stamped
from qualification.execution.launch import Launched, launch
from qualification.execution.supervision import Ending, Limits
from qualification.execution.supervisor import Authority
from qualification.execution.worker import Job
from qualification.figures import Unreadable
from qualification.records import Criterion, Ground, Lease, Verdict, WorkloadResult
from qualification.verdict import fold
from qualification.workloads.recompute import replays

JOB_FILE = "job.json"
OUTPUT_FOLDER = "output"
_NOT_JUDGED = {
    Ending.START_FAILED: "the worker could not be started",
    Ending.CANCELLED: "cancelled",
    Ending.LEASE_LOST: "lease lost",
    Ending.CALLER_GONE: "the pipeline was killed",
    Ending.SUPERVISOR_LOST: "the supervisor was killed",
}
"""Endings that say nothing about the policy: the result is INCOMPLETE, whatever the worker had done by then."""


@dataclass(frozen=True)
class Assignment:
    """An attempt with its folder and what it holds while it runs."""

    attempt: Attempt
    folder: Path
    leases: tuple[Lease, ...]
    limits: Limits


def run_workload(
    name: str,
    assignment: Assignment,
    blobs: BlobStore,
    *,
    authority: Authority | None = None,
    on_event: Callable[[Stamped], None] | None = None,
    cancelled: Callable[[], str | None] | None = None,
) -> tuple[WorkloadResult, Launched]:
    """Run one workload to its end, whatever that is, and return its result with what the launcher knows."""
    folder = assignment.folder / name
    output = folder / OUTPUT_FOLDER
    output.mkdir(parents=True, mode=0o700)
    job = folder / JOB_FILE
    job.write_bytes(msgspec.json.encode(_job(name, assignment.attempt, output)))
    attempt = assignment.attempt
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    launched = launch(
        job,
        run=attempt.run,
        token=attempt.token,
        folder=folder,
        limits=assignment.limits,
        gpus=[lease.resource for lease in assignment.leases if attempt.ground is Ground.NATIVE],
        authority=authority,
        on_event=on_event,
        cancelled=cancelled,
    )
    raw = collect(folder, output, blobs)
    criteria, verdict, reason = judge(name, attempt, launched, raw)
    result = WorkloadResult(
        run=attempt.run,
        attempt=attempt.attempt,
        workload=name,
        ground=attempt.ground,
        policy=attempt.policy,
        rules_sha256=attempt.rules_sha256,
        verdict=verdict,
        criteria=criteria,
        artifacts=raw.artifacts,
        leases=assignment.leases,
        environment_sha256=attempt.environment_sha256,
        started_at=started,
        duration_ms=launched.outcome.duration_ms,
        exit_code=launched.outcome.exit_code,
        reason=reason,
        parameters=attempt.parameters,
        requested_by=attempt.requested_by,
    )
    return result, launched


def judge(
    name: str, attempt: Attempt, launched: Launched, raw: RawData
) -> tuple[tuple[Criterion, ...], Verdict, str | None]:
    """Return criteria, verdict and reason of one workload; a run that was ended from outside is not judged."""
    outcome = launched.outcome
    if outcome.ending in _NOT_JUDGED:
        return (), Verdict.INCOMPLETE, "; ".join(filter(None, (_NOT_JUDGED[outcome.ending], outcome.reason)))
    observation = Observation(
        workload=name,
        ground=attempt.ground,
        exit_code=outcome.exit_code,
        timed_out=outcome.ending in (Ending.TIMED_OUT, Ending.SILENT, Ending.CLOSE_TIMED_OUT),
        events=understood(launched.events()),
        artifacts=raw.files,
        replays=replays(raw.files),
        measured={"duration_ms": outcome.duration_ms, "sweep_ms": outcome.sweep_ms},
        parameters=attempt.parameters,
    )
    try:
        criteria = tuple(import_module(f"qualification.criteria.{name}").judge(observation))
    except Exception as error:  # a judge that stumbles over a worker's data has judged nothing
        return (), Verdict.INCOMPLETE, f"the criteria could not be computed: {type(error).__name__}: {error}"
    verdict = fold(criteria)
    return criteria, verdict, _reason(outcome.reason, observation, criteria, raw.problems, verdict)


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


def _said(body: object) -> str:
    if isinstance(body, Unreadable) or not isinstance(body, Mapping):
        return "something unreadable"
    return f"{body.get('type')}: {body.get('text')}"


def _job(name: str, attempt: Attempt, output: Path) -> Job:
    return Job(
        run=attempt.run,
        attempt=attempt.attempt,
        workload=name,
        ground=attempt.ground,
        policy=attempt.policy.name,
        subject=attempt.source,
        output=str(output),
        parameters=attempt.parameters,
    )
