"""A Prefect server that is slow or away never holds up the loop that renews the lease; a cancellation is heard."""

from __future__ import annotations

import socket
import time
import uuid
from pathlib import Path

import pytest

from flows.cancellation import cancellation


def test_a_server_that_never_answers_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.uuid4()))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: address}), cancellation() as cancelled:
            deadline = time.monotonic() + 4
            while time.monotonic() < deadline:
                asked = time.monotonic()
                assert cancelled() is None
                assert time.monotonic() - asked < 0.5
                time.sleep(0.1)


def test_without_a_server_nobody_cancels() -> None:
    with cancellation() as cancelled:
        assert cancelled() is None


def test_a_cancellation_is_heard(with_server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling, Running

    from flows.sweep import sweep

    with get_client(sync_client=True) as client:
        run = client.create_flow_run(sweep, state=Running())
        monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(run.id))
        with cancellation() as cancelled:
            time.sleep(3)
            assert cancelled() is None
            client.set_flow_run_state(run.id, Cancelling(), force=True)
            deadline = time.monotonic() + 20
            while (said := cancelled()) is None:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    assert said == "cancelled in Prefect"
