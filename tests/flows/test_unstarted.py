"""Requests that were cancelled before anything ran: each leaves INCOMPLETE results, a CLEAN receipt and no lease."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from db.engine import open_for_reading, open_for_writing
from db.leases import DatabaseLeaseStore
from flows import pipeline
from flows.cli.main import execute
from flows.perform import RUNS
from flows.pipeline import qualify_once
from flows.progress import Progress
from flows.request import Request, validate
from flows.summary import Summary
from flows.unstarted import is_recorded, record_unstarted
from qualification.errors import RefusedError
from qualification.execution.identity import read_entry, record
from qualification.execution.inventory import virtual_devices
from qualification.execution.leases import LeaseRequest
from qualification.records import Ground, ReceiptStatus, Verdict
from tests.flows.subjects import Trainer
from tests.scripted_nvml import NO_PERMISSION, ScriptedNvml

MIG = "MIG-00000000-0000-0000-0000-00000000000a"
RUN = "20990101-000000-cancelled"


@pytest.fixture
def request_for_a_head(trainer: Trainer, permit: Callable[[str], None]) -> Request:
    head = trainer.head("raise RuntimeError('never')", **{"requirements.lock": "nobody-installs-this==1"})
    permit(head)
    return Request(head=head, repository=str(trainer.folder), run=RUN)


@pytest.fixture
def busy(private: Path) -> Iterator[DatabaseLeaseStore]:
    """Both virtual devices are held by a living process."""
    process = subprocess.Popen(["sleep", "60"])
    entry = read_entry(process.pid)
    assert entry is not None
    engine = open_for_writing()
    store = DatabaseLeaseStore(engine)
    devices = virtual_devices()
    host = devices[0].split(":")[1]
    asked = LeaseRequest(
        run="other", attempt=1, candidates=devices, count=2, folder=str(private), host=host, holder=record(entry)
    )
    assert isinstance(store.try_acquire(store.enqueue(asked)), tuple)
    yield store
    engine.dispose()
    process.kill()
    process.wait()


def _accounted(summary: Summary | None, reason: str) -> None:
    assert summary is not None
    assert {result.verdict for result in summary.workloads} == {Verdict.INCOMPLETE}
    assert reason in (summary.workloads[0].reason or "")
    assert summary.receipt is not None
    assert (summary.receipt.status, summary.receipt.leases) == (ReceiptStatus.CLEAN, ())
    assert summary.exit_code == 4
    assert execute(["verify"]) == 0


def test_a_request_that_never_started_is_recorded_once(request_for_a_head: Request) -> None:
    request, rules = validate(request_for_a_head)
    summary = record_unstarted(request, rules, Progress(), "cancelled by a test")
    _accounted(summary, "not finished: cancelled by a test, before a device was leased")
    assert is_recorded(RUN)
    assert record_unstarted(request, rules, Progress(), "cancelled by a test") is None


def test_a_request_that_is_cancelled_in_the_queue_is_recorded_and_leaves_the_queue(
    request_for_a_head: Request, busy: DatabaseLeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "install_lock", lambda _: None)
    progress, said = Progress(), list[str]()
    progress.also = lambda name, text: said.append(text) if name == "waiting" else None
    summary = qualify_once(*validate(request_for_a_head), progress, lambda: "cancelled" if said else None)
    assert "held by run other" in said[0]
    _accounted(summary, "not finished: cancelled, before a device was leased")
    assert [holding.run for holding in busy.holdings()] == ["other"] * 2


@pytest.mark.parametrize(
    ("gpus", "said"), [((MIG,), "it is a MIG device, which is not supported"), ((), "NVML lists none")]
)
def test_a_request_without_a_usable_gpu_is_refused_before_any_lease_and_leaves_nothing(
    private: Path,
    request_for_a_head: Request,
    nvml: ScriptedNvml,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(pipeline, "install_lock", lambda _: None)
    nvml.say(*(f"0 0 0 0 {NO_PERMISSION}" for _ in gpus), gpus=gpus, mark="mig")
    native = msgspec.structs.replace(request_for_a_head, ground=Ground.NATIVE)
    with pytest.raises(RefusedError, match=said) as refused:
        qualify_once(*validate(native), Progress())
    assert "nothing was started" in str(refused.value)
    assert not list((private / RUNS).glob("*/*/attempt.json"))
    assert not is_recorded(RUN)
    engine = open_for_reading()
    assert DatabaseLeaseStore(engine).resources() == ()
    engine.dispose()
