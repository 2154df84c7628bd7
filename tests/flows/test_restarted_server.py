"""A Prefect server that is killed in the middle of a run and comes back: the run ends without it, with its evidence."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.cli.main import execute
from qualification.execution.launch import free_port
from tests.flows.places import PREFECT, WAIT_SECONDS, Place, answer_of

HEAD = """Path(given['recordings'], 'alive').touch()
while not Path(given['recordings'], 'go').exists():
    time.sleep(0.1)
raise RuntimeError('stop')"""


class Server:
    """A server at one address, with one database, started as often as it is needed."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.environment = os.environ | {"PREFECT_HOME": str(folder / "server")}
        self.address = f"http://127.0.0.1:{self.port}/api"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the server until the context ends, then kill it."""
        command = [*PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(self.port), "--no-ui"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=self.environment, start_new_session=True, **quiet)
        try:
            self._wait()
            yield
        finally:
            os.killpg(process.pid, 9)
            process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            assert time.monotonic() < deadline, "the server does not answer"
            try:
                if httpx.get(f"{self.address}/health").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.2)


def test_a_run_ends_with_its_evidence_while_the_server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path)
    place = Place(tmp_path, server.address)
    for name in ("QUALIFY_HOME", "QUALIFY_TRUST"):
        monkeypatch.setenv(name, place.environment[name])
    head = place.permitted_head(HEAD)
    try:
        with server.running():
            place.prefect("work-pool", "create", "qualify", "--type", "process")
            place.prefect("--no-prompt", "deploy", "-n", "pr-head")
            place.start_worker()
            triggered = place.trigger(head)
            place.wait_for_a_living_worker(0)
        (alive,) = place.home.glob("runs/*/*/full_step/output/alive")
        alive.with_name("go").touch()
        deadline = time.monotonic() + WAIT_SECONDS
        while place.holdings():
            assert time.monotonic() < deadline, "the run still holds its device"
            time.sleep(0.2)
        assert execute(["verify"]) == 0
        with server.running():
            answer = answer_of(triggered)
    finally:
        place.end()
    assert answer["workloads"][0]["verdict"] == "FAILED"
    assert (answer["receipt"]["status"], answer["receipt"]["recovered"]) == ("CLEAN", False)
