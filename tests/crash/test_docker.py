"""A container whose exec, supervisor and keeper were all killed is found, removed and accounted for by a sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows.cli.main import execute
from qualification.execution.inventory import virtual_devices
from qualification.execution.supervisor import read_census
from qualification.providers import docker as provider
from tests.crash.dying import let_leases_run_out
from tests.docker_engine import Engine

pytestmark = pytest.mark.docker


def start(engine: Engine, device: str) -> subprocess.Popen[bytes]:
    command = [
        str(Path(sys.executable).with_name("qualify")),
        "exec",
        "--json",
        "--gpu",
        device,
        "--image",
        engine.image,
    ]
    return subprocess.Popen([*command, "--", "sleep", "600"], stdout=subprocess.PIPE, start_new_session=True)


def sweep(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, object]]]:
    capsys.readouterr()
    code = execute(["sweep", "--json"])
    return code, json.loads(capsys.readouterr().out)["attempts"]


def test_a_sweep_removes_what_killed_keepers_left(
    docker_engine: Engine, private: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    (device, _) = virtual_devices()
    run = start(docker_engine, device)
    docker_engine.wait_for_container()
    (census_file,) = private.glob("runs/*/1/command/census.json")
    census = read_census(census_file.parent)
    assert census is not None
    for pid in (run.pid, census.supervisor.pid, *(process.pid for process in census.processes)):
        os.kill(pid, signal.SIGKILL)
    run.communicate()
    assert len(docker_engine.containers()) == 1
    let_leases_run_out()
    code, (attempt,) = sweep(capsys)
    receipt = attempt["receipt"]
    assert isinstance(receipt, dict)
    assert (code, receipt["status"], receipt["recovered"], receipt["provider"]) == (0, "CLEAN", True, "docker")
    (probe,) = [probe for probe in receipt["probes"] if probe["name"] == "containers"]
    assert len(probe["values"]["removed"]) == 1
    assert docker_engine.containers() == []
    assert sweep(capsys) == (0, [])


def test_a_silent_engine_is_unverified_until_a_sweep_hears_it_again(
    docker_engine: Engine, private: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    monkeypatch.setattr(provider, "CALL_SECONDS", 2)
    (device, _) = virtual_devices()

    def silence() -> None:
        docker_engine.wait_for_container()
        docker_engine.process.send_signal(signal.SIGSTOP)

    helper = threading.Thread(target=silence)
    helper.start()
    options = ["--json", "--timeout", "4", "--grace", "1", "--gpu", device, "--image", docker_engine.image]
    code = execute(["exec", *options, "--", "sleep", "600"])
    helper.join()
    try:
        first = json.loads(capsys.readouterr().out)
        assert (code, first["status"]) == (6, "UNVERIFIED")
        assert sweep(capsys)[0] == 0
    finally:
        docker_engine.process.send_signal(signal.SIGCONT)
    code, (attempt,) = sweep(capsys)
    receipt = attempt["receipt"]
    assert isinstance(receipt, dict)
    assert (code, receipt["status"], receipt["recovered"]) == (0, "CLEAN", True)
    assert docker_engine.containers() == []
    assert execute(["exec", "--gpu", device, "--", "true"]) == 0
