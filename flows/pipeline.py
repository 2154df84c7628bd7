"""One qualification from a validated request to its decision, all of it recorded. Knows nothing of Prefect."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from db.deciding import examine
from db.engine import reading
from db.models import runs
from flows.candidates import candidates
from flows.perform import assign, perform
from flows.permission import require_permission
from flows.progress import Progress
from flows.publishing import after_a_run
from flows.recorder import Recorder
from flows.request import Request, new_run
from flows.resolve import Resolved, resolve
from flows.summary import Summary, summarise
from qualification.errors import RefusedError
from qualification.execution.probes.gpus import GpuReader
from qualification.execution.supervision import Limits
from qualification.git import read_reference
from qualification.home import trust
from qualification.locked import LockedPackages, install_lock
from qualification.rules import RulesDocument
from qualification.subject import installed_checkout
from qualification.workloads import devices_needed

SILENCE_SECONDS = 900
"""A worker that says nothing for so long waits for something outside it, such as a stale build lock."""

_REASON_WIDTH = 160
DAY = timedelta(hours=20)
"""A daily schedule may fire this early and still mean the next day."""


class Duplicate(Exception):  # noqa: N818 - not an error: the answer is there already
    """The same request was answered by another run; its name is the text."""


def require_runnable(request: Request) -> None:
    """Raise what would refuse a validated request before its lease: its source, policy, permission, devices, database.

    Asked ahead of an orchestrator that takes seconds to start; the run asks again.
    """
    resolved = resolve(request)
    recorder = Recorder()
    try:
        require_permission(resolved, recorder)
    finally:
        recorder.close()
    with GpuReader() as reader:
        candidates(request.ground, reader, devices_needed(request.workloads))


def qualify_once(
    request: Request, rules: RulesDocument, progress: Progress, cancelled: Callable[[], str | None] | None = None
) -> Summary:
    """Run one qualification and return its summary. Raises Duplicate for a daily request that was answered today."""
    resolved = resolve(request)
    changed = " with uncommitted changes" if resolved.subject.dirty else ""
    progress.stage("subject", f"{resolved.subject.repository} {resolved.subject.commit}{changed}")
    recorder = Recorder()
    try:
        if request.once_a_day and (answered := _answered(recorder, request, rules, resolved)):
            raise Duplicate(answered)
        progress.stage("permission", require_permission(resolved, recorder))
        address = request.repository or (str(installed_checkout()) if request.reference else None)
        _require_head(resolved, address)
        locked = None if cancelled is not None and cancelled() is not None else _packages(request, resolved)
        assignment = assign(request, rules, resolved, recorder, request.run or new_run(), locked)
        limits = Limits(
            wall_seconds=request.timeout_seconds,
            silence_seconds=SILENCE_SECONDS,
            terminate_seconds=request.grace_seconds,
        )
        perform(assignment, recorder, progress, limits=limits, image=request.image, cancelled=cancelled)
        case = examine(recorder.engine, recorder.blobs, trust(), run=assignment.run, address=address)
        recorder.record([case.decision()], assignment.subject)
        recorder.seal()
        because = textwrap.shorten(case.ruling.reasons[0], _REASON_WIDTH, placeholder=" ...")
        progress.stage("decision", f"{case.ruling.decision}: {because}")
        if shown := after_a_run(case, recorder):
            progress.stage("status", shown)
        return summarise(case)
    finally:
        recorder.close()


def _packages(request: Request, resolved: Resolved) -> LockedPackages | None:
    """Install what the subject's lock names; an image brings its own."""
    return None if resolved.lock is None or request.image is not None else install_lock(resolved.lock)


def _answered(recorder: Recorder, request: Request, rules: RulesDocument, resolved: Resolved) -> str | None:
    since = (datetime.now(UTC) - DAY).strftime("%Y-%m-%dT%H:%M:%S")
    query = select(runs.c.run).where(
        runs.c.commit == resolved.subject.commit,
        runs.c.policy_sha256 == resolved.policy.sha256,
        runs.c.rules_sha256 == rules.sha256,
        runs.c.ground == request.ground.value,
        runs.c.started_at > since,
    )
    with reading(recorder.engine) as connection:
        return connection.execute(query.order_by(runs.c.sequence.desc()).limit(1)).scalar_one_or_none()


def _require_head(resolved: Resolved, address: str | None) -> None:
    """Refuse a head that its reference has left meanwhile: the permission to run it is no word on what came after."""
    reference = resolved.subject.reference
    if reference is None or address is None:
        return
    now = read_reference(address, reference)
    if now != resolved.subject.commit:
        raise RefusedError(
            f"{reference} names {now} now, not {resolved.subject.commit}: ask again for the new head once permitted"
        )
