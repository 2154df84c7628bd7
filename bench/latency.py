"""How soon a triggered head runs on a process pool, behind a backlog of late scheduled runs and without one.

A real server, a real worker that asks every 2 s, the deployments of prefect.yaml. Measured is the time from a run's
creation to the start of its flow, as the server stamps both; the heads are unpermitted ones, which the flow refuses, so
that the pool and not the workload is what takes time. The peer is the same pool with Prefect's default of 10 s.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from qualification.execution.launch import free_port

ROOT = Path(__file__).parents[1]
PREFECT = [sys.executable, "-m", "prefect"]
LATE = 20
HEADS = 8
TARGET_SECONDS = 12.0
START_SECONDS = 120.0


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Run a process until the context ends, then end it and all that it started in its session."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def server(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Prefect server with the deployments on it; gives the environment of its users."""
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = kept | {
        "QUALIFY_HOME": str(folder / "home"),
        "QUALIFY_TRUST": str(folder / "trust"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(ROOT),
    }
    with running([*PREFECT, "server", "start", "--port", str(port), "--no-ui"], environment):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{environment['PREFECT_API_URL']}/health").is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        for words in (
            ["work-pool", "create", "qualify", "--type", "process"],
            ["work-queue", "create", "heads", "--pool", "qualify", "--priority", "1"],
            ["work-queue", "create", "scheduled", "--pool", "qualify", "--priority", "2"],
            ["--no-prompt", "deploy", "-n", "nightly", "-n", "pr-head", "-n", "sweep"],
        ):
            subprocess.run([*PREFECT, *words], cwd=ROOT, env=environment, check=True, capture_output=True)
        yield environment


def post(environment: dict[str, str], deployment: str, body: dict[str, object]) -> dict[str, Any]:
    """Create a run of a deployment and return it as the server shows it; a server that is busy is asked again."""
    address = environment["PREFECT_API_URL"]
    found = httpx.get(f"{address}/deployments/name/{deployment}").raise_for_status().json()["id"]
    for _ in range(20):
        answer = httpx.post(f"{address}/deployments/{found}/create_flow_run", json=body, timeout=30)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            break
        time.sleep(0.5)
    created: dict[str, Any] = answer.raise_for_status().json()
    return created


def backlog(environment: dict[str, str]) -> None:
    """Leave what a worker's weekend leaves: late nightly runs (of a policy that nobody has) and late sweeps."""
    for number in range(1, LATE + 1):
        late = (datetime.now(UTC) - timedelta(hours=number)).isoformat()
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": late}}
        post(environment, "qualify/nightly", {"state": state, "parameters": {"policy": "nobody-has-it"}})
        post(environment, "sweep/sweep", {"state": state})


def wait_for(environment: dict[str, str], run: dict[str, Any]) -> float:
    """Wait until a run's flow has started, and return the seconds since the run was created."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        now = httpx.get(f"{environment['PREFECT_API_URL']}/flow_runs/{run['id']}").raise_for_status().json()
        if now["start_time"]:
            return (datetime.fromisoformat(now["start_time"]) - datetime.fromisoformat(run["created"])).total_seconds()
        time.sleep(0.2)
    raise TimeoutError(f"run {run['name']} did not start within {START_SECONDS:.0f} s")


def latencies(*, query_seconds: int, late: bool) -> list[float]:
    """Return the seconds that heads waited, triggered one after the other from the moment that a worker starts."""
    with (
        tempfile.TemporaryDirectory(prefix="qualify-bench-", ignore_cleanup_errors=True) as name,
        server(Path(name)) as environment,
    ):
        if late:
            backlog(environment)
        asking = environment | {"PREFECT_WORKER_QUERY_SECONDS": str(query_seconds)}
        with running([*PREFECT, "worker", "start", "--pool", "qualify"], asking):
            waited = []
            for number in range(HEADS):
                head = {"head": f"{number:040x}", "repository": str(ROOT)}
                waited.append(wait_for(environment, post(environment, "qualify/pr-head", {"parameters": head})))
            return waited


def main() -> None:
    """Print medians and 95th percentiles of the waiting time."""
    for what, query_seconds, late in (
        (f"behind {LATE} late nightly runs and {LATE} late sweeps", 2, True),
        ("idle pool", 2, False),
        ("idle pool, Prefect's default of 10 s between questions", 10, False),
    ):
        waited = sorted(latencies(query_seconds=query_seconds, late=late))
        p95 = statistics.quantiles(waited, n=20, method="inclusive")[-1]
        print(
            f"{what}: median {statistics.median(waited):.1f} s, p95 {p95:.1f} s, most {waited[-1]:.1f} s "
            f"of {HEADS} (at most {TARGET_SECONDS:.0f} s)"
        )


if __name__ == "__main__":
    main()
