"""Requests that a server accepted and never started, or ended before they had an attempt: recorded as INCOMPLETE.

The same pipeline does it, with a cancellation that is there from the beginning: nothing is leased, nothing started.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import select

from db.engine import open_for_reading, reading
from db.models import runs
from flows.pipeline import qualify_once
from flows.progress import Progress
from flows.request import Request, read_request, validate
from flows.summary import Summary
from qualification.errors import ConfigurationError, QualificationError
from qualification.rules import RulesDocument

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

FLOW = "qualify"
LOOK_BACK = timedelta(days=7)


def is_recorded(run: str) -> bool:
    """Whether the evidence knows a run of this name."""
    try:
        engine = open_for_reading()
    except ConfigurationError:  # there is no database yet
        return False
    try:
        with reading(engine) as connection:
            return connection.execute(select(runs.c.run).where(runs.c.run == run)).first() is not None
    finally:
        engine.dispose()


def record_unstarted(request: Request, rules: RulesDocument, progress: Progress, reason: str) -> Summary | None:
    """Record a request with a run's name as INCOMPLETE for ``reason``; None when its run is recorded already."""
    if request.run is None or is_recorded(request.run):
        return None
    return qualify_once(request, rules, progress, lambda: reason)


def never_ran(flow_run: FlowRun) -> bool:
    """Whether Prefect ended a flow run without ever letting it start: a run that is over cannot start any more."""
    return flow_run.state is not None and flow_run.state.is_final() and not flow_run.run_count


def record_all_unstarted(client: SyncPrefectClient, progress: Progress) -> list[str]:
    """Record every request for an exact head that never ran, and return the names of their runs.

    One that could not have run, because it is malformed or nobody permitted it, is left out.
    """
    recorded = []
    for flow_run in _unstarted(client):
        try:
            given = {**flow_run.parameters, "run": run_name(flow_run)}
            request, rules = validate(read_request({name: value for name, value in given.items() if value is not None}))
            if record_unstarted(request, rules, progress, reason_of(flow_run)) is not None:
                recorded.append(run_name(flow_run))
        except QualificationError as error:
            progress.stage("unstarted", f"{flow_run.name}: {error}")
    return recorded


def run_name(flow_run: FlowRun) -> str:
    """Return the name under which the evidence knows a flow run."""
    return str(flow_run.parameters.get("run") or f"prefect-{flow_run.id}")


def reason_of(flow_run: FlowRun) -> str:
    """Return why a flow run never ran, in Prefect's words."""
    state = flow_run.state
    said = f": {state.message}" if state is not None and state.message else ""
    return f"Prefect ended it as {state.name if state is not None else 'unknown'} before it started{said}"


def _unstarted(client: SyncPrefectClient) -> Iterator[FlowRun]:
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType

    ends = [StateType.CANCELLED, StateType.CRASHED, StateType.FAILED]
    ended = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=ends))
    since = filters.FlowRunFilterExpectedStartTime.model_validate({"after_": datetime.now(UTC) - LOOK_BACK})
    found = client.read_flow_runs(
        flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=[FLOW])),
        flow_run_filter=filters.FlowRunFilter(expected_start_time=since, state=ended),
        limit=200,
    )
    yield from (one for one in found if one.parameters.get("head") and never_ran(one))
