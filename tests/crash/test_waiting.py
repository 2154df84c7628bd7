"""Waiting for a device: expiry gives it to nobody while its holder lives, then to the next one after a recovery."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from db.engine import open_for_writing
from db.leases import DatabaseLeaseStore
from qualification.execution.attempt import MANIFEST_FILE, Manifest
from qualification.execution.files import write_durably
from qualification.execution.holding import DeviceRefused, acquire
from qualification.execution.identity import myself, read_entry, record
from qualification.execution.inventory import virtual_devices
from qualification.execution.leases import LeaseRequest
from qualification.execution.probes.gpus import GpuReader
from qualification.execution.recovery import Recovery
from qualification.records import Process, Receipt, ReceiptStatus
from tests.crash.dying import let_leases_run_out

(DEVICE, _) = virtual_devices()


@pytest.fixture
def store(private: Path) -> Iterator[DatabaseLeaseStore]:
    engine = open_for_writing()
    yield DatabaseLeaseStore(engine)
    engine.dispose()


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def ask(run: str, folder: Path, holder: Process) -> LeaseRequest:
    return LeaseRequest(
        run=run, attempt=1, candidates=(DEVICE,), count=1, folder=str(folder / run), host=_host(), holder=holder
    )


def _host() -> str:
    return DEVICE.split(":")[1]


def give_to(store: DatabaseLeaseStore, folder: Path, process: subprocess.Popen[bytes]) -> None:
    entry = read_entry(process.pid)
    assert entry is not None
    asked = ask("first", folder, record(entry))
    granted = store.try_acquire(store.enqueue(asked))
    assert isinstance(granted, tuple)
    manifest = Manifest(
        run="first",
        attempt=1,
        token="none",
        trainer=False,
        provider="process",
        host=asked.host,
        holder=asked.holder,
        worktree=None,
        baselines=(),
        recorded=False,
    )
    Path(asked.folder).mkdir()
    write_durably(Path(asked.folder) / MANIFEST_FILE, msgspec.json.encode(manifest))


def test_an_expired_lease_waits_for_its_living_holder_and_is_recovered_after_it(
    store: DatabaseLeaseStore, holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    give_to(store, tmp_path, holder)
    let_leases_run_out()
    said: list[str] = []
    receipts: list[Receipt] = []

    def waiting(reason: str) -> None:
        said.append(reason)
        assert not receipts
        holder.kill()
        holder.wait()

    def keep(_: Manifest, receipt: Receipt) -> None:
        receipts.append(receipt)

    with GpuReader() as reader:
        recover = Recovery(store, reader, keep).holding
        held = acquire(store, ask("second", tmp_path, myself()), reader=reader, recover=recover, waiting=waiting)
    assert "is still alive" in said[0]
    (receipt,) = receipts
    assert (receipt.run, receipt.recovered, receipt.status) == ("first", True, ReceiptStatus.CLEAN)
    assert [lease.token for lease in receipt.leases] == [2]
    assert [lease.token for lease in held.leases] == [3]


def test_patience_ends_with_the_reason(
    store: DatabaseLeaseStore, holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    give_to(store, tmp_path, holder)
    with GpuReader() as reader, pytest.raises(DeviceRefused, match="held by run first"):
        acquire(
            store,
            ask("second", tmp_path, myself()),
            reader=reader,
            recover=lambda _: "not asked: the lease is in force",
            waiting=lambda _: None,
            patience_seconds=0.5,
        )
    assert [holding.run for holding in store.holdings()] == ["first"]
