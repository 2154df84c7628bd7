"""The Prefect flow ``qualify``: a thin shell round resolve, perform and decide. Prefect's state is never proof."""

from __future__ import annotations

from typing import Any

import msgspec
from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from db.deciding import examine
from flows.cancellation import cancellation
from flows.perform import assign, new_run, perform
from flows.permission import require_permission
from flows.progress import shared
from flows.recorder import Recorder
from flows.request import DEFAULT_GRACE_SECONDS, DEFAULT_TIMEOUT_SECONDS, read_request, validate
from flows.resolve import resolve
from flows.summary import Summary, markdown, rows_of, summarise
from qualification.execution.supervision import Limits
from qualification.home import trust


@flow(name="qualify", validate_parameters=False, persist_result=False)
def qualify(
    head: str | None = None,
    repository: str | None = None,
    reference: str | None = None,
    policy: str = "forecast",
    ground: str = "rehearsal",
    workloads: list[str] | None = None,
    rules: str = "standard",
    parameters: dict[str, int | str] | None = None,
    requested_by: str | None = None,
    timeout_seconds: int = DEFAULT_TIMEOUT_SECONDS,
    grace_seconds: int = DEFAULT_GRACE_SECONDS,
) -> dict[str, Any]:
    """Qualify a policy of one exact source and return the run's summary; parameters are those of ``flows.request``."""
    given = {
        "head": head,
        "repository": repository,
        "reference": reference,
        "policy": policy,
        "ground": ground,
        "workloads": workloads or [],
        "rules": rules,
        "parameters": parameters or {},
        "requested_by": requested_by,
        "timeout_seconds": timeout_seconds,
        "grace_seconds": grace_seconds,
    }
    request, document = validate(read_request(given))
    progress = shared()
    resolved = resolve(request)
    changed = " with uncommitted changes" if resolved.subject.dirty else ""
    progress.stage("subject", f"{resolved.subject.repository} {resolved.subject.commit}{changed}")
    recorder = Recorder()
    try:
        progress.stage("permission", require_permission(resolved, recorder))
        assignment = assign(request, document, resolved, recorder, new_run())
        limits = Limits(wall_seconds=request.timeout_seconds, terminate_seconds=request.grace_seconds)
        done = perform(assignment, recorder, progress, limits=limits, cancelled=cancellation())
        case = examine(recorder.engine, recorder.blobs, trust(), run=assignment.run)
        recorder.record([case.decision()], assignment.subject)
        recorder.seal()
        progress.stage("decision", f"{case.ruling.decision}: {case.ruling.reasons[0]}")
        summary = summarise(done, case.decision())
    finally:
        recorder.close()
    publish(summary)
    plain: dict[str, Any] = msgspec.to_builtins(summary)
    return plain


def publish(summary: Summary) -> None:
    """Leave the summary where Prefect's pages show it."""
    key = f"qualify-{summary.run}"
    create_markdown_artifact(markdown(summary), key=key, description=f"Run {summary.run}")
    create_table_artifact(rows_of(summary), key=f"{key}-table", description=f"Run {summary.run}")
