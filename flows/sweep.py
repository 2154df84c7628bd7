"""The Prefect flow ``sweep``: close what killed runs left behind. Sweeping again changes nothing."""

from __future__ import annotations

from prefect import flow

from flows.progress import shared
from flows.recovering import recovery
from qualification.execution.probes.gpus import GpuReader
from qualification.home import home


@flow(name="sweep", validate_parameters=False, persist_result=False)
def sweep() -> list[str]:
    """Recover every attempt whose holder is gone and return the folders that got a receipt."""
    recovered = []
    with GpuReader() as reader, recovery(reader) as recovering:
        for item in recovering.sweep(home() / "runs"):
            status = item.receipt.status.value if item.receipt else "left alone"
            shared().stage("sweep", f"{item.folder}: {status} {item.reason or ''}".rstrip())
            if item.receipt:
                recovered.append(str(item.folder))
    return recovered
