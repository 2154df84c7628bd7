"""Whether somebody cancelled the flow run in Prefect: read from the server, because Prefect stops nothing by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

ASK_SECONDS = 2.0


def cancellation() -> Callable[[], str | None]:
    """Return what says why the present flow run is cancelled, or None while it is not.

    It asks the server at most every two seconds. A server that does not answer has cancelled nothing.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.runtime import flow_run
    from prefect.settings import PREFECT_API_URL

    identity = flow_run.id
    if not identity or PREFECT_API_URL.value() is None:
        return lambda: None
    asked_at = time.monotonic()

    def cancelled() -> str | None:
        nonlocal asked_at
        if time.monotonic() - asked_at < ASK_SECONDS:
            return None
        asked_at = time.monotonic()
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(identity).state
        except Exception:  # whatever keeps Prefect from answering, the run goes on by its own evidence
            return None
        called_off = state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)
        return "cancelled in Prefect" if called_off else None

    return cancelled
