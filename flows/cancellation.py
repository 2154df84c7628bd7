"""Whether somebody cancelled the flow run in Prefect: read from the server, because Prefect stops nothing by itself.

A thread of its own asks, so that a server that is slow or away never keeps a lease from being renewed.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from uuid import UUID

ASK_SECONDS = 2.0


@contextlib.contextmanager
def cancellation() -> Iterator[Callable[[], str | None]]:
    """Give what says why the present flow run is cancelled, or None while it is not; it never waits."""
    from prefect.runtime import flow_run
    from prefect.settings import PREFECT_API_URL

    if not flow_run.id or PREFECT_API_URL.value() is None:
        yield lambda: None
        return
    said: list[str] = []
    done = threading.Event()
    settings = contextvars.copy_context()
    asked = (_ask, UUID(flow_run.id), said, done)
    threading.Thread(target=settings.run, args=asked, name="cancellation", daemon=True).start()
    try:
        yield lambda: said[0] if said else None
    finally:
        done.set()


def _ask(identity: UUID, said: list[str], done: threading.Event) -> None:
    """Ask until the run is cancelled or over. A server that does not answer has cancelled nothing."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType

    while not said and not done.wait(ASK_SECONDS):
        # Whatever keeps Prefect from answering, the run goes on by its own evidence.
        with contextlib.suppress(Exception), get_client(sync_client=True) as client:
            state = client.read_flow_run(identity).state
            if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                said.append("cancelled in Prefect")
