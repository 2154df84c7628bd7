"""What supervision costs: a core's share and memory beside torchrun's agent, a receipt's time, 100 dead leases."""

from __future__ import annotations

import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
from sqlalchemy import text

from db.engine import open_for_writing, sqlite_url, writing
from db.leases import DatabaseLeaseStore
from qualification.execution.attempt import Attempt, host
from qualification.execution.environment import child_environment
from qualification.execution.files import write_durably
from qualification.execution.holding import HeldLeases
from qualification.execution.identity import myself
from qualification.execution.leases import LeaseRequest
from qualification.execution.probes.gpus import GpuReader
from qualification.execution.recovery import Recovery
from qualification.execution.supervision import CENSUS_FILE, Command, Limits, Specification
from qualification.execution.supervisor import read_census, supervise
from qualification.records import ReceiptStatus

SECONDS = 20
RECEIPTS = 20
DEAD = 100


def specification(folder: Path, *command: str) -> Specification:
    """Ask for one command."""
    return Specification(
        run="bench",
        token=secrets.token_hex(8),
        folder=str(folder),
        command=Command(words=command, environment=child_environment(folder)),
        limits=Limits(terminate_seconds=1),
        working_folder=str(folder),
    )


def cost_of(find: Callable[[], int | None], run: Callable[[Callable[[], None]], object]) -> tuple[float, float]:
    """Return percent of a core and peak MB of the process that ``find`` names while ``run`` lasts, after its start."""
    first: list[tuple[float, float]] = []
    last: list[tuple[float, float]] = []
    peak = 0.0

    def look() -> None:
        nonlocal peak
        pid = find()
        if pid is None:
            return
        try:
            process = psutil.Process(pid)
            used = process.cpu_times()
            peak = max(peak, process.memory_info().rss / 1e6)
        except psutil.Error:
            return
        last[:] = [(time.monotonic(), used.user + used.system)]
        if not first:
            first.extend(last)

    run(look)
    elapsed = last[0][0] - first[0][0]
    return 100 * (last[0][1] - first[0][1]) / elapsed, peak


def supervised(folder: Path) -> tuple[float, float]:
    """Supervise a command that waits, and return what the supervisor took."""

    def find() -> int | None:
        census = read_census(folder)
        return census.supervisor.pid if census and census.processes else None

    return cost_of(find, lambda look: supervise(specification(folder, "sleep", str(SECONDS)), progress=look))


def elastic() -> tuple[float, float]:
    """Run the same command below torchrun's agent, and return what the agent took."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "sleep", str(SECONDS)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def find() -> int | None:
        return process.pid if psutil.Process(process.pid).children() else None

    def run(look: Callable[[], None]) -> None:
        while process.poll() is None:
            look()
            time.sleep(0.25)

    return cost_of(find, run)


def receipts(folder: Path) -> list[float]:
    """Return the milliseconds of receipts after a small run without GPU."""
    attempt = Attempt(run="bench", attempt=1, folder=folder, recorded=False)
    attempt.begin()
    attempt.execute(["true"], "command")
    taken = []
    for _ in range(RECEIPTS):
        started = time.perf_counter()
        assert attempt.take_receipt().status is ReceiptStatus.CLEAN
        taken.append(1000 * (time.perf_counter() - started))
    return taken


def die_with_a_lease(store: DatabaseLeaseStore, folder: Path, index: int) -> None:
    """Leave what a killed run leaves: a lease, a manifest whose holder is dead, a census whose processes are dead."""
    dead = msgspec.structs.replace(myself(), start_ticks=1)
    run = f"dead-{index}"
    request = LeaseRequest(
        run=run, attempt=1, candidates=(f"virtual:{run}",), count=1, folder=str(folder), host=host(), holder=dead
    )
    granted = store.try_acquire(store.enqueue(request))
    assert isinstance(granted, tuple)
    attempt = Attempt(run=run, attempt=1, folder=folder, held=HeldLeases(store, granted), recorded=False)
    attempt.begin()
    attempt.execute(["true"], "command")
    (folder / "command" / "outcome.json").unlink()
    census = read_census(folder / "command")
    manifest = msgspec.json.decode((folder / "attempt.json").read_bytes())
    manifest["holder"] = msgspec.to_builtins(dead)
    write_durably(folder / "attempt.json", msgspec.json.encode(manifest))
    write_durably(folder / "command" / CENSUS_FILE, msgspec.json.encode(census))


def sweep(folder: Path) -> float:
    """Return the seconds that one sweep of 100 dead leases takes."""
    engine = open_for_writing(sqlite_url(folder / "evidence.db"))
    store = DatabaseLeaseStore(engine)
    runs = folder / "runs"
    for index in range(DEAD):
        die_with_a_lease(store, runs / f"dead-{index}" / "1", index)
    with writing(engine) as connection:
        connection.execute(text("UPDATE leases SET expires_at_ms = 0"))
    started = time.perf_counter()
    with GpuReader() as reader:
        done = Recovery(store, reader, lambda *_: None).sweep(runs)
    elapsed = time.perf_counter() - started
    assert len(done) == DEAD
    assert all(item.receipt and item.receipt.status is ReceiptStatus.CLEAN for item in done)
    assert not store.holdings()
    engine.dispose()
    return elapsed


def main() -> None:
    """Print what supervision, receipts and sweeps cost on this host."""
    with tempfile.TemporaryDirectory(prefix="qualify-bench-") as name:
        folder = Path(name)
        share, memory = supervised(folder / "supervised")
        agent_share, agent_memory = elastic()
        print(f"supervisor     {share:6.2f} % of a core  {memory:6.1f} MB")
        print(f"torchrun agent {agent_share:6.2f} % of a core  {agent_memory:6.1f} MB")
        print(f"memory ratio   {agent_memory / memory:6.1f}")
        taken = sorted(receipts(folder / "receipts"))
        print(f"receipt without GPU: median {statistics.median(taken):.0f} ms, most {taken[-1]:.0f} ms of {RECEIPTS}")
        processes = len(psutil.pids())
        print(f"sweep of {DEAD} dead leases: {sweep(folder / 'sweep'):.1f} s, with {processes} processes on the host")
