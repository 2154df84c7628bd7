"""A machine for workers of a Prefect server: its folders, its people, and what is triggered and started on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from db.engine import open_for_reading
from db.leases import DatabaseLeaseStore
from tests.flows.conftest import permitted_by_an_operator
from tests.flows.subjects import Trainer

ROOT = Path(__file__).parents[2]
PREFECT = [sys.executable, "-m", "prefect"]
WAIT_SECONDS = 90.0


class Place:
    """A worker's machine: its folders, its server, and the worker processes started on it."""

    def __init__(self, folder: Path, address: str) -> None:
        self.home = folder / "home"
        self.trainer = Trainer(folder / "trainer")
        self.key = folder / "operator.pem"
        self.environment = os.environ | {
            "QUALIFY_HOME": str(self.home),
            "QUALIFY_TRUST": str(folder / "trust"),
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": address,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.workers: list[subprocess.Popen[bytes]] = []

    def prefect(self, *arguments: str) -> str:
        """Run one command of Prefect's and return what it printed."""
        done = subprocess.run(
            [*PREFECT, *arguments], cwd=ROOT, env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def start_worker(self, pool: str = "qualify") -> subprocess.Popen[bytes]:
        """Start a worker of a pool."""
        command = [*PREFECT, "worker", "start", "--pool", pool]
        quiet = subprocess.DEVNULL
        worker = subprocess.Popen(command, env=self.environment, stdout=quiet, stderr=quiet, start_new_session=True)
        self.workers.append(worker)
        return worker

    def flow_run(self, client: Any) -> Any:
        """Return the identity of the flow run whose workload came to life last."""
        newest = max(self.home.glob("runs/*/*/full_step/output/alive"), key=lambda path: path.stat().st_mtime_ns)
        (found,) = [run for run in client.read_flow_runs(limit=200) if run.name == newest.parents[3].name]
        return found.id

    def permitted_head(self, body: str, **others: str) -> str:
        """Commit a behaviour, and other files by path, permit it and return the commit."""
        head = self.trainer.head(body, **others)
        permitted_by_an_operator(head, self.key, self.home.parent / "trust")
        return head

    def trigger(self, head: str, *options: str) -> subprocess.Popen[str]:
        """Start ``qualify trigger`` for a head."""
        program = "from flows.cli.main import main; main()"
        command = [
            sys.executable,
            "-c",
            program,
            "trigger",
            "--head",
            head,
            "--repo",
            str(self.trainer.folder),
            "--json",
        ]
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *options], env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def wait_for_a_living_worker(self, seen: int) -> None:
        """Wait until more than ``seen`` workloads have come to life."""
        deadline = time.monotonic() + WAIT_SECONDS
        while len(list(self.home.glob("runs/*/*/full_step/output/alive"))) <= seen:
            assert time.monotonic() < deadline, "no workload came to life"
            time.sleep(0.2)

    def holdings(self) -> int:
        """Return how many leases are open."""
        engine = open_for_reading()
        try:
            return len(DatabaseLeaseStore(engine).holdings())
        finally:
            engine.dispose()

    def end(self) -> None:
        """Kill every worker."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def answer_of(triggered: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a triggered run and return the JSON that it printed."""
    output, said = triggered.communicate(timeout=WAIT_SECONDS)
    assert output, said
    answer: dict[str, Any] = json.loads(output)
    assert answer["exit_code"] == triggered.returncode
    return answer
