"""The deployments on a real Prefect server with a real process worker: triggered, cancelled, killed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import psutil
import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId

from flows.cli.main import execute
from flows.progress import Progress
from flows.unstarted import record_all_unstarted
from tests.flows.places import WAIT_SECONDS, Place, answer_of

DEPLOYED = ("-n", "nightly", "-n", "pr-head", "-n", "sweep")
BLOCK = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nPath(given['recordings'], 'alive').touch()\ntime.sleep(600)"


@pytest.fixture(scope="module")
def place(prefect_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Deploy everything and start one worker."""
    place = Place(tmp_path_factory.mktemp("deployments"), prefect_address)
    place.prefect("work-pool", "create", "qualify", "--type", "process")
    place.prefect("--no-prompt", "deploy", *DEPLOYED)
    place.start_worker()
    try:
        yield place
    finally:
        place.end()


@pytest.fixture(autouse=True)
def _here(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUALIFY_HOME", "QUALIFY_TRUST", "PREFECT_API_URL"):
        monkeypatch.setenv(name, place.environment[name])


def test_a_triggered_head_is_answered_from_the_evidence(place: Place) -> None:
    answer = answer_of(place.trigger(place.permitted_head("raise RuntimeError('stop')")))
    assert answer["workloads"][0]["verdict"] == "FAILED"
    assert answer["receipt"]["status"] == "CLEAN"
    assert answer["exit_code"] == 3
    assert place.holdings() == 0


def test_an_unpermitted_head_ends_without_evidence(place: Place) -> None:
    triggered = place.trigger(place.trainer.head("raise RuntimeError('never')"))
    _, said = triggered.communicate(timeout=WAIT_SECONDS)
    assert triggered.returncode == 4
    assert "has no run" in said.splitlines()[-1]
    assert "nobody permitted" in said


def test_a_cancelled_run_ends_within_its_grace_with_all_its_evidence(place: Place) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    seen = len(list(place.home.glob("runs/*/*/full_step/output/alive")))
    triggered = place.trigger(place.permitted_head(BLOCK), "--grace", "2")
    place.wait_for_a_living_worker(seen)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(place.flow_run(client), Cancelling(), force=True)
    asked = time.monotonic()
    while place.holdings():
        assert time.monotonic() - asked < 2 + 10, "the cancelled run still holds its device"
        time.sleep(0.2)
    answer = answer_of(triggered)
    assert answer["workloads"][0]["verdict"] == "INCOMPLETE"
    assert answer["receipt"]["status"] == "CLEAN"
    assert execute(["verify"]) == 0


@pytest.fixture
def idle(place: Place) -> str:
    """Return a deployment on a pool that no worker serves."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate

    with get_client(sync_client=True) as client:
        served = client.read_deployment_by_name("qualify/pr-head")
        client.create_work_pool(WorkPoolCreate(name="idle", type="process"), overwrite=True)
        client.create_deployment(
            flow_id=served.flow_id, name="idle", entrypoint=served.entrypoint, work_pool_name="idle"
        )
    return "qualify/idle"


def test_a_run_cancelled_before_it_starts_is_accounted_for_by_whoever_triggered_it(place: Place, idle: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled

    head = place.permitted_head("raise RuntimeError('never')")
    triggered = place.trigger(head, "--deployment", idle)
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(idle)
        wanted = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
        deadline = time.monotonic() + WAIT_SECONDS
        while not (runs := client.read_flow_runs(flow_run_filter=wanted)):
            assert time.monotonic() < deadline, "nothing was triggered"
            time.sleep(0.2)
        client.set_flow_run_state(runs[0].id, Cancelled(message="by hand"), force=True)
    answer = answer_of(triggered)
    assert answer["run"] == runs[0].name
    assert answer["workloads"][0]["verdict"] == "INCOMPLETE"
    assert "Prefect ended it as Cancelled before it started: by hand" in answer["workloads"][0]["reason"]
    assert (answer["receipt"]["status"], answer["exit_code"]) == ("CLEAN", 4)
    assert place.holdings() == 0


def test_a_sweep_accounts_for_a_run_that_was_cancelled_before_it_started(place: Place, idle: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled

    permitted = place.permitted_head("raise RuntimeError('never either')")
    unpermitted = place.trainer.head("raise RuntimeError('nobody permitted it')")
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(idle)
        for head in (permitted, unpermitted):
            asked = {"head": head, "repository": str(place.trainer.folder)}
            created = client.create_flow_run_from_deployment(deployment.id, parameters=asked, name=head)
            client.set_flow_run_state(created.id, Cancelled(), force=True)
        (recorded,) = record_all_unstarted(client, Progress())
        assert record_all_unstarted(client, Progress()) == []
    assert recorded.startswith("prefect-")
    assert execute(["gate", "check", recorded]) == 4
    assert execute(["verify"]) == 0


def test_a_killed_worker_holds_nothing_for_ever(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    seen = len(list(place.home.glob("runs/*/*/full_step/output/alive")))
    head = place.permitted_head(BLOCK)
    triggered = place.trigger(head, "--grace", "1")
    place.wait_for_a_living_worker(seen)
    worker = place.workers.pop()
    for process in [*psutil.Process(worker.pid).children(recursive=True), psutil.Process(worker.pid)]:
        if "supervisor_process" not in " ".join(process.cmdline()) and "execution.worker" not in process.cmdline():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    worker.wait()
    triggered.kill()
    triggered.communicate()
    place.start_worker()
    second = answer_of(place.trigger(place.permitted_head("raise RuntimeError('stop')")))
    assert second["receipt"]["status"] == "CLEAN"
    deadline = time.monotonic() + WAIT_SECONDS
    recovered: list[dict[str, Any]] = []
    while not recovered:
        assert time.monotonic() < deadline, "the killed run was not recovered"
        time.sleep(1)
        capsys.readouterr()
        assert execute(["sweep", "--json"]) == 0
        recovered = [one["receipt"] for one in json.loads(capsys.readouterr().out)["attempts"] if one["receipt"]]
    assert [(one["status"], one["recovered"], one["reason"]) for one in recovered] == [("CLEAN", True, None)]
    assert place.holdings() == 0
    assert execute(["verify"]) == 0


def test_schedules_name_their_zone_and_deploying_again_changes_nothing(place: Place) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        before = client.read_deployment_by_name("qualify/nightly")
        place.prefect("--no-prompt", "deploy", *DEPLOYED)
        after = client.read_deployment_by_name("qualify/nightly")
    assert (after.id, after.entrypoint, after.parameters) == (before.id, before.entrypoint, before.parameters)
    assert [one.schedule.cron for one in after.schedules] == [one.schedule.cron for one in before.schedules]  # type: ignore[union-attr]
    assert [one.schedule.timezone for one in after.schedules] == ["UTC"]


@pytest.mark.parametrize("start", ["2026-10-24", "2027-03-27", "2027-10-30"])
def test_a_change_of_the_clock_neither_repeats_nor_drops_a_night(place: Place, start: str) -> None:
    import asyncio

    from prefect.client.orchestration import get_client
    from prefect.server.schemas.schedules import CronSchedule

    with get_client(sync_client=True) as client:
        (found,) = client.read_deployment_by_name("qualify/nightly").schedules
    schedule = CronSchedule(cron=found.schedule.cron, timezone=found.schedule.timezone)  # type: ignore[union-attr]
    first = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo("UTC"))
    dates = asyncio.run(schedule.get_dates(4, start=first))
    assert [date.date().toordinal() - first.toordinal() for date in dates] == [0, 1, 2, 3]
