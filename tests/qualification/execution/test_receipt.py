import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from qualification.execution.environment import CACHES
from qualification.execution.files import write_durably
from qualification.execution.identity import read_entry, record
from qualification.execution.probes import host
from qualification.execution.receipt import (
    GPU_PROBES,
    REQUIRED,
    Footprint,
    fold,
    receipt_of_nothing,
    status_of_lease,
    take_receipt,
)
from qualification.execution.supervision import CENSUS_FILE, Ending, Outcome, encode
from qualification.execution.supervisor import LeaseLost, read_census
from qualification.execution.sweep import carriers
from qualification.records import Lease, Probe, ProbeStatus, ReceiptStatus
from tests.qualification.execution.supervising import run

HARMLESS = (ProbeStatus.CLEAN, ProbeStatus.NOT_APPLICABLE)


def probe(name: str, status: ProbeStatus, **values: str) -> Probe:
    return Probe(name=name, source="test", status=status, duration_ms=0, values={**values})


def footprint(folder: Path, *outcomes: Outcome, token: str = "t0k3n", **changes: object) -> Footprint:
    fields = {"run": "r", "attempt": 1, "token": token, "folders": (folder,), "outcomes": outcomes, **changes}
    return Footprint(**fields)  # type: ignore[arg-type]


@given(st.dictionaries(st.sampled_from(REQUIRED), st.lists(st.sampled_from(ProbeStatus), min_size=1, max_size=2)))
def test_only_a_complete_and_spotless_set_of_probes_is_clean(found: dict[str, list[ProbeStatus]]) -> None:
    probes = [probe(name, status) for name, statuses in found.items() for status in statuses]
    seen = [one.status for one in probes]
    status, reason = fold(probes)
    assert (status is ReceiptStatus.DIRTY) == (ProbeStatus.LEFTOVER in seen)
    assert (status is ReceiptStatus.CLEAN) == (set(found) == set(REQUIRED) and all(one in HARMLESS for one in seen))
    assert (reason is None) == (status is ReceiptStatus.CLEAN)


@given(st.permutations([probe(name, ProbeStatus.CLEAN) for name in REQUIRED]), st.integers(0, len(REQUIRED) - 1))
def test_taking_any_probe_away_or_failing_it_ends_clean(probes: list[Probe], index: int) -> None:
    assert fold(probes)[0] is ReceiptStatus.CLEAN
    assert fold([*probes[:index], *probes[index + 1 :]])[0] is ReceiptStatus.UNVERIFIED
    failed = probe(probes[index].name, ProbeStatus.UNREADABLE)
    assert fold([*probes, failed])[0] is ReceiptStatus.UNVERIFIED


CHECKS = ("leftover_processes", "leftover_groups", "shared_memory", "sockets", "listening", "retire")


def test_no_subset_of_failing_probes_gives_a_clean_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(tmp_path, "true")

    def fail(*_: object) -> None:
        raise PermissionError("not for you")

    for size in range(len(CHECKS) + 1):
        for failing in itertools.combinations(CHECKS, size):
            with monkeypatch.context() as patch:
                for name in failing:
                    patch.setattr(host, name, fail)
                receipt = take_receipt(footprint(tmp_path, outcome, ports=(1,)))
            expected = ReceiptStatus.UNVERIFIED if failing else ReceiptStatus.CLEAN
            assert receipt.status is expected, failing


def test_a_swept_escapee_is_clean_and_listed(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sh", "-c", "sleep 60 & sleep 0.3")
    receipt = take_receipt(footprint(tmp_path, outcome))
    assert receipt.status is ReceiptStatus.CLEAN
    assert [process.command for process in receipt.swept] == ["sleep"]
    assert (receipt.exit_code, receipt.timed_out, receipt.leftovers) == (0, False, ())


def test_a_process_with_the_token_that_nobody_swept_is_dirty(tmp_path: Path) -> None:
    outcome = run(tmp_path, "true", token="f0rg0tten")
    stray = subprocess.Popen(["sleep", "60"], env={"QUALIFY_RUN_TOKEN": "f0rg0tten", "PATH": "/usr/bin:/bin"})
    try:
        receipt = take_receipt(footprint(tmp_path, outcome, token="f0rg0tten"))
        assert receipt.status is ReceiptStatus.DIRTY
        assert [process.pid for process in receipt.leftovers] == [stray.pid]
    finally:
        stray.kill()
        stray.wait()
    assert take_receipt(footprint(tmp_path, outcome, token="f0rg0tten")).status is ReceiptStatus.CLEAN


def test_a_leftover_of_the_sweep_that_is_still_there_is_dirty_by_identity(tmp_path: Path) -> None:
    outcome = run(tmp_path, "true")
    stray = subprocess.Popen(["sleep", "60"])
    try:
        entry = read_entry(stray.pid)
        assert entry is not None
        left = replace(outcome, leftovers=(record(entry),))
        assert take_receipt(footprint(tmp_path, left)).status is ReceiptStatus.DIRTY
    finally:
        stray.kill()
        stray.wait()


def test_an_uninterruptible_leftover_is_described_by_what_it_waits_in_and_holds(tmp_path: Path) -> None:
    """The parent in vfork is in state D, and holds a segment of shared memory open."""
    source = (
        "import ctypes, os, sys; sys.stdout.flush(); held = open(sys.argv[1], 'w'); libc = ctypes.CDLL(None)\n"
        "print('ready', flush=True)\n"
        "if libc.vfork() == 0: libc.sleep(60); libc._exit(0)"
    )
    segment = Path(f"/dev/shm/qualify-test-{secrets.token_hex(4)}")
    outcome = run(tmp_path, "true", token="unint3rrupt1ble")
    environment = {"QUALIFY_RUN_TOKEN": "unint3rrupt1ble", "PATH": os.environ["PATH"]}
    stray = subprocess.Popen([sys.executable, "-c", source, segment], env=environment, stdout=subprocess.PIPE)
    try:
        assert stray.stdout is not None
        stray.stdout.readline()
        deadline = time.monotonic() + 10
        while (entry := read_entry(stray.pid)) is None or entry.state != "uninterruptible":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        receipt = take_receipt(footprint(tmp_path, outcome, token="unint3rrupt1ble"))
        assert receipt.status is ReceiptStatus.DIRTY
        assert "uninterruptible" in {process.state for process in receipt.leftovers}
        assert f"holds {segment}" in (receipt.reason or "")
        assert "waits in" in (receipt.reason or "")
    finally:
        for process in carriers("unint3rrupt1ble"):
            os.kill(process.pid, signal.SIGKILL)
        stray.communicate()
        segment.unlink()


def test_a_run_without_census_is_unverified(tmp_path: Path) -> None:
    receipt = take_receipt(footprint(tmp_path))
    assert receipt.status is ReceiptStatus.UNVERIFIED
    assert "no census" in (receipt.reason or "")


@pytest.mark.parametrize(("cgroup", "status"), [("/gone", ReceiptStatus.CLEAN), (None, ReceiptStatus.UNVERIFIED)])
def test_only_a_scope_proves_that_a_killed_supervisor_left_nothing(
    tmp_path: Path, cgroup: str | None, status: ReceiptStatus
) -> None:
    outcome = replace(run(tmp_path, "true"), ending=Ending.SUPERVISOR_LOST)
    census = read_census(tmp_path)
    assert census is not None
    write_durably(tmp_path / CENSUS_FILE, encode(replace(census, cgroup=cgroup)))
    assert take_receipt(footprint(tmp_path, outcome)).status is status


def test_shared_memory_and_sockets_with_the_token_are_dirty(tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    outcome = run(tmp_path, "sh", "-c", "touch /dev/shm/psm_$QUALIFY_RUN_TOKEN", token=token)
    receipt = take_receipt(footprint(tmp_path, outcome, token=token))
    try:
        assert receipt.status is ReceiptStatus.DIRTY
        assert f"/dev/shm/psm_{token}" in (receipt.reason or "")
    finally:
        (Path("/dev/shm") / f"psm_{token}").unlink()


def test_the_private_caches_are_listed_and_gone(tmp_path: Path) -> None:
    receipt = take_receipt(footprint(tmp_path, run(tmp_path, "true")))
    caches = next(one for one in receipt.probes if one.name == "caches")
    retired = caches.values["retired"]
    assert isinstance(retired, tuple)
    assert len(retired) == len(CACHES)
    assert not any(Path(path).exists() for path in retired)


def test_a_worktree_that_stays_and_a_port_that_is_open_are_dirty(tmp_path: Path) -> None:
    outcome = run(tmp_path, "true")
    with socket.create_server(("127.0.0.1", 0)) as server:
        receipt = take_receipt(footprint(tmp_path, outcome, worktree=tmp_path, ports=(server.getsockname()[1],)))
    statuses = {one.name: one.status for one in receipt.probes}
    assert (statuses["worktree"], statuses["ports"]) == (ProbeStatus.LEFTOVER, ProbeStatus.LEFTOVER)


def test_a_lost_lease_is_unverified_and_names_it(tmp_path: Path) -> None:
    def lost() -> None:
        raise LeaseLost("virtual:0 with token 1 expired 3 s ago")

    lease = Lease(resource="virtual:0", token=1)
    outcome = run(tmp_path, "true")
    assert take_receipt(footprint(tmp_path, outcome, leases=(lease,)), check_leases=lambda: None).status is (
        ReceiptStatus.CLEAN
    )
    receipt = take_receipt(footprint(tmp_path, outcome, leases=(lease,)), check_leases=lost)
    assert receipt.status is ReceiptStatus.UNVERIFIED
    assert "expired 3 s ago" in (receipt.reason or "")


def test_a_real_gpu_without_a_watch_is_never_clean(tmp_path: Path) -> None:
    lease = Lease(resource="GPU-1", token=1)
    outcome = run(tmp_path, "true")
    receipt = take_receipt(footprint(tmp_path, outcome, leases=(lease,)), check_leases=lambda: None)
    assert receipt.status is ReceiptStatus.UNVERIFIED
    assert "gpu_memory" in (receipt.reason or "")


def test_each_lease_ends_by_its_own_card() -> None:
    common = [probe(name, ProbeStatus.CLEAN) for name in REQUIRED if name not in GPU_PROBES]
    cards = [probe(name, ProbeStatus.CLEAN, gpu="GPU-1") for name in GPU_PROBES]
    cards += [probe(name, ProbeStatus.UNREADABLE, gpu="GPU-2") for name in GPU_PROBES]
    receipt = receipt_of_nothing("r", {})
    whole = replace(receipt, probes=(*common, *cards))
    statuses = [status_of_lease(whole, Lease(resource=name, token=1))[0] for name in ("GPU-1", "GPU-2", "GPU-3")]
    assert statuses == [ReceiptStatus.CLEAN, ReceiptStatus.UNVERIFIED, ReceiptStatus.UNVERIFIED]


def test_a_run_that_was_not_started_says_so() -> None:
    receipt = receipt_of_nothing("r", {"MIG-1": "it is a MIG device"})
    assert (receipt.status, receipt.exit_code) == (ReceiptStatus.UNVERIFIED, None)
    assert "nothing was started: MIG-1" in (receipt.reason or "")


def test_a_claim_to_be_closed_does_not_outweigh_a_living_actor(tmp_path: Path) -> None:
    outcome = run(tmp_path, "true", token="act0r")
    closed = b'{"sequence":0,"monotonic_ns":1,"rank":0,"event":{"event":"close"}}\n'
    (tmp_path / "events.jsonl").write_bytes(closed)
    stray = subprocess.Popen(["sleep", "60"], env={"QUALIFY_RUN_TOKEN": "act0r", "PATH": "/usr/bin:/bin"})
    try:
        receipt = take_receipt(footprint(tmp_path, outcome, token="act0r", trainer=True))
    finally:
        stray.kill()
        stray.wait()
    trainer = next(one for one in receipt.probes if one.name == "trainer")
    assert (trainer.status, trainer.values["closed"]) == (ProbeStatus.LEFTOVER, 1)
