"""Put a recovered receipt into the ledger, with INCOMPLETE results for what the killed attempt did not finish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from sqlalchemy import select

from db.engine import reading
from db.leases import DatabaseLeaseStore
from db.models import workload_results
from flows.raw_data import collect
from flows.recorder import Recorder
from flows.workload import process_folders, result
from qualification.assignment import Assignment, load_assignment
from qualification.execution.attempt import Manifest
from qualification.execution.probes.gpus import GpuReader
from qualification.execution.recovery import Recovery
from qualification.home import home
from qualification.records import Artifact, Receipt, Verdict

REASON = "the pipeline was killed before this workload had a result"


@contextmanager
def recovery(reader: GpuReader) -> Iterator[Recovery]:
    """Give what recovers killed attempts with the evidence database, opened for writing meanwhile."""
    recorder = Recorder()
    try:
        yield recovery_with(recorder, reader)
    finally:
        recorder.close()


def recovery_with(recorder: Recorder, reader: GpuReader) -> Recovery:
    """Return what recovers killed attempts into the ledger of ``recorder``."""
    store = DatabaseLeaseStore(recorder.engine)
    return Recovery(store, reader, lambda manifest, receipt: record_recovered(recorder, manifest, receipt))


def record_recovered(recorder: Recorder, manifest: Manifest, receipt: Receipt) -> None:
    """Record what a killed attempt amounts to, all or nothing. An attempt without a subject has nothing to record."""
    assignment = load_assignment(home() / "runs" / manifest.run / str(manifest.attempt))
    if assignment is None:
        return
    columns = workload_results.c
    query = select(columns.workload).where(columns.run == manifest.run, columns.attempt == manifest.attempt)
    with reading(recorder.engine) as connection:
        finished = set(connection.execute(query).scalars())
    missing = [
        result(
            name,
            assignment,
            Verdict.INCOMPLETE,
            started=datetime.fromisoformat(assignment.started_at),
            artifacts=_kept(assignment, name, recorder),
            leases=receipt.leases,
            reason=REASON,
        )
        for name in assignment.workloads
        if name not in finished
    ]
    recorder.record([*missing, receipt], assignment.subject)
    recorder.seal()


def _kept(assignment: Assignment, workload: str, recorder: Recorder) -> tuple[Artifact, ...]:
    """Keep what the killed workload had written by then; blobs it stored already get the entry that names them."""
    attempt = home() / "runs" / assignment.run / str(assignment.attempt)
    return tuple(
        artifact
        for process, (folder, output) in process_folders(attempt, workload).items()
        if folder.is_dir()
        for artifact in collect(folder, output, recorder.blobs, process).artifacts
    )
