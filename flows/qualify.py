"""The Prefect flow ``qualify``: a thin shell round :mod:`flows.pipeline`. Prefect's state is never proof."""

from __future__ import annotations

import os
from typing import Any

import msgspec
from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.runtime import deployment
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed

from flows.cancellation import cancellation
from flows.pipeline import Duplicate, qualify_once
from flows.pools import VARIABLE, require_possible
from flows.progress import shared
from flows.request import DEFAULT_GRACE_SECONDS, DEFAULT_TIMEOUT_SECONDS, new_run, read_request, validate
from flows.summary import Summary, markdown, rows_of
from flows.unstarted import record_unstarted


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
    run: str | None = None,
    once_a_day: bool = False,
    image: str | None = None,
) -> dict[str, Any] | State[Any]:
    """Qualify a policy of one exact source and return the run's summary; parameters are those of ``flows.request``.

    They are validated here again, because a server may have been told not to.
    """
    given = dict(locals())
    request, document = validate(read_request({**given, "workloads": workloads or [], "parameters": parameters or {}}))
    require_possible(request, os.environ.get(VARIABLE))
    request = msgspec.structs.replace(request, run=request.run or new_run())
    progress = shared()
    if PREFECT_API_URL.value() is not None:
        logger = get_run_logger()
        progress.also = lambda name, text: logger.info("%s: %s", name, text)
    progress.console.quiet = bool(deployment.id)  # a worker's log shows what the logger says
    try:
        with cancellation() as cancelled:
            summary = qualify_once(request, document, progress, cancelled)
    except Duplicate as answered:
        return Completed(name="Duplicate", message=f"answered by run {answered}")
    except Exception:
        raise
    except BaseException as interruption:  # a server's request is accounted for however early it was interrupted
        if deployment.id:
            record_unstarted(request, document, progress, f"interrupted by {type(interruption).__name__}")
        raise
    finally:
        progress.also = None
    publish(summary)
    plain: dict[str, Any] = msgspec.to_builtins(summary)
    return plain


def publish(summary: Summary) -> None:
    """Leave the summary where Prefect's pages show it."""
    key = f"qualify-{summary.run}"
    create_markdown_artifact(markdown(summary), key=key, description=f"Run {summary.run}")
    create_table_artifact(rows_of(summary), key=f"{key}-table", description=f"Run {summary.run}")
