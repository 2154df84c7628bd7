"""``qualify trigger``: start the deployment pr-head on a Prefect server, follow it, and answer from the evidence."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import msgspec
import typer

from flows.cli.run import show
from flows.orchestrator import prepare
from flows.pools import require_possible
from flows.progress import Progress, shared
from flows.request import DEFAULT_GRACE_SECONDS, DEFAULT_TIMEOUT_SECONDS, Request, new_run, validate
from qualification.errors import ConfigurationError, RefusedError, UnknownError
from qualification.records import Ground

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

    from flows.summary import Summary
    from qualification.rules import RulesDocument

DEPLOYMENT = "qualify/pr-head"
ASK_SECONDS = 1.0


def command(
    head: Annotated[str, typer.Option(help="The commit (40 hexadecimal digits).", show_default=False)],
    repo: Annotated[str | None, typer.Option(help="Where the head is: a folder, or an https or ssh URL.")] = None,
    reference: Annotated[str | None, typer.Option(help="What must still name it, such as refs/pull/7/head.")] = None,
    policy: Annotated[str, typer.Option(help="A policy that the subject ships.")] = "forecast",
    ground: Annotated[Ground, typer.Option(help="A virtual device, or the GPUs of the worker.")] = Ground.REHEARSAL,
    timeout: Annotated[int, typer.Option(help="Seconds that each workload may take.", min=1)] = DEFAULT_TIMEOUT_SECONDS,
    grace: Annotated[int, typer.Option(help="Seconds between TERM and KILL.", min=0)] = DEFAULT_GRACE_SECONDS,
    image: Annotated[str | None, typer.Option(help="Run the workers in containers of this image, by digest.")] = None,
    deployment: Annotated[str, typer.Option(help="Another deployment of the flow qualify.")] = DEPLOYMENT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Start a deployed run of one head and wait for it, with live progress.

    The server is the one that PREFECT_API_URL names. The answer comes from the evidence database, which this machine
    must share with the worker ($QUALIFY_DATABASE, or the same $QUALIFY_HOME); what Prefect says is only shown.

    \b
    Exit code: that of qualify run; 4 when Prefect ended and no evidence of the run is here.

    \b
    Examples:
      qualify trigger --head 0123456789abcdef0123456789abcdef01234567 --repo ../trainer
      qualify trigger --head $(git rev-parse HEAD) --repo https://github.com/example/trainer
    """
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigurationError("no Prefect server: set PREFECT_API_URL, for example http://127.0.0.1:4200/api")
    request, rules = validate(
        Request(
            head=head,
            repository=repo,
            reference=reference,
            policy=policy,
            ground=ground,
            timeout_seconds=timeout,
            grace_seconds=grace,
            image=image,
        )
    )
    prepare()
    request = msgspec.structs.replace(request, run=new_run())
    flow_run = _run_to_the_end(request, deployment)
    summary = _unstarted(request, rules, flow_run) or _answer(str(request.run), request.repository)
    show(summary, as_json=as_json)
    return summary.exit_code


def _run_to_the_end(request: Request, deployment: str) -> FlowRun:
    """Create the flow run, follow it until Prefect calls it ended, and return what Prefect says of it then."""
    from prefect.client.orchestration import get_client

    progress = shared()
    with get_client(sync_client=True) as client:
        created = _create(client, deployment, request)
        progress.stage("triggered", f"{deployment} as {created.name}, run {request.run}")
        return _follow(client, created.id, progress)


def _unstarted(request: Request, rules: RulesDocument, flow_run: FlowRun) -> Summary | None:
    """Record a request that Prefect ended before it started; None when it did start."""
    from flows.unstarted import never_ran, reason_of, record_unstarted

    return record_unstarted(request, rules, shared(), reason_of(flow_run)) if never_ran(flow_run) else None


def _create(client: SyncPrefectClient, deployment: str, request: Request) -> FlowRun:
    import httpx
    from prefect.exceptions import ObjectNotFound

    try:
        found = client.read_deployment_by_name(deployment)
        if found.work_pool_name is not None:
            require_possible(request, client.read_work_pool(found.work_pool_name).type)
        return client.create_flow_run_from_deployment(
            found.id, parameters=msgspec.to_builtins(request), name=request.run
        )
    except ObjectNotFound:
        raise ConfigurationError(f"the server has no deployment {deployment}: prefect deploy --all makes it") from None
    except httpx.TransportError as error:
        raise RefusedError(f"the Prefect server {os.environ['PREFECT_API_URL']} does not answer: {error}") from None


def _follow(client: SyncPrefectClient, identity: UUID, progress: Progress) -> FlowRun:
    """Show new states and log lines until the state is a final one; a server that is away is asked again."""
    import httpx

    said, shown = "", 0
    while True:
        try:
            flow_run = client.read_flow_run(identity)
            shown += _show_logs(client, identity, shown, progress)
        except httpx.TransportError as error:
            progress.event("prefect", "server away", {"error": str(error)})
        else:
            state = flow_run.state
            if state is not None and state.name != said:
                said = state.name or state.type.value
                progress.stage("prefect", f"{said}{f': {state.message}' if state.message else ''}")
            if state is not None and state.is_final():
                time.sleep(ASK_SECONDS)  # the last lines come after the state
                with suppress(httpx.TransportError):
                    _show_logs(client, identity, shown, progress)
                return flow_run
        time.sleep(ASK_SECONDS)


def _show_logs(client: SyncPrefectClient, identity: UUID, shown: int, progress: Progress) -> int:
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[identity]))
    lines = client.read_logs(log_filter=wanted, offset=shown, limit=200)
    for line in lines:
        if line.name == "prefect.flow_runs":
            progress.stage("run", line.message)
    return len(lines)


def _answer(run: str, address: str | None) -> Summary:
    """Return what the evidence here says of a run."""
    from db.deciding import examine
    from db.engine import open_for_reading
    from flows.summary import summarise
    from qualification.evidence.blobs import BlobStore
    from qualification.home import home, trust

    engine = open_for_reading()
    try:
        return summarise(examine(engine, BlobStore(home()), trust(), run=run, address=address))
    except ConfigurationError:
        raise UnknownError(
            f"Prefect ended, but the evidence database here has no run {run}; see qualify doctor"
        ) from None
    finally:
        engine.dispose()
