"""The Prefect flow ``sweep``: close what killed runs left behind. Sweeping again changes nothing."""

from __future__ import annotations

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from flows.progress import shared
from flows.recovering import recovery
from flows.unstarted import record_all_unstarted
from qualification.execution.probes.gpus import GpuReader
from qualification.home import home


@flow(name="sweep", validate_parameters=False, persist_result=False)
def sweep() -> list[str]:
    """Recover every attempt whose holder is gone, and record the requests that Prefect ended before they started.

    Returns the folders of the former and the names of the latter.
    """
    recovered = []
    with GpuReader() as reader, recovery(reader) as recovering:
        for item in recovering.sweep(home() / "runs"):
            status = item.receipt.status.value if item.receipt else "left alone"
            shared().stage("sweep", f"{item.folder}: {status} {item.reason or ''}".rstrip())
            if item.receipt:
                recovered.append(str(item.folder))
    if PREFECT_API_URL.value() is not None:
        with get_client(sync_client=True) as client:
            recovered += record_all_unstarted(client, shared())
    return recovered
