"""The deployments on a docker pool: a real server, a real worker, a real engine; and what such a pool cannot do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli.main import execute
from flows.pools import DOCKER, require_possible
from flows.request import Request
from qualification.errors import ConfigurationError
from qualification.records import Ground
from tests.docker_engine import Engine
from tests.flows.places import ROOT, Place, answer_of
from tests.flows.subjects import Trainer

IN_THE_POOL = ("--deployment", "qualify/docker-pr-head")
CONTRACT = "trainer_rank/contract.py"
STOPS = "raise RuntimeError('stopped by the head')"
WAITS = """import json, sys, time
from pathlib import Path
Path(json.loads(Path(sys.argv[1]).read_text())["output"], "alive").touch()
time.sleep(600)"""
"""The image of the tests has no PyTorch, so heads act when their contract is imported, which comes first."""


@pytest.fixture
def place(docker_engine: Engine, prefect_address: str, tmp_path: Path) -> Iterator[Place]:
    """Deploy what runs in containers and start a worker that makes them."""
    place = Place(tmp_path, prefect_address)
    place.trainer = Trainer(place.home / "trainer")  # where the containers see it
    place.environment |= {
        "DOCKER_HOST": docker_engine.host,
        "QUALIFY_IMAGE": docker_engine.image,
        "QUALIFY_SOURCE": str(ROOT),
        "QUALIFY_USER": f"{os.getuid()}:{os.getgid()}",
    }
    for folder in (place.home, tmp_path / "trust"):
        folder.mkdir(exist_ok=True)
    place.prefect("work-pool", "create", "qualify-docker", "--type", "docker")
    place.prefect("--no-prompt", "deploy", "-n", "docker-*")
    place.start_worker("qualify-docker")
    try:
        yield place
    finally:
        place.end()


@pytest.mark.docker
def test_heads_are_qualified_and_cancelled_in_containers_of_a_docker_pool(
    place: Place, docker_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    for name in ("QUALIFY_HOME", "QUALIFY_TRUST", "PREFECT_API_URL"):
        monkeypatch.setenv(name, place.environment[name])
    answer = answer_of(place.trigger(place.permitted_head("", **{CONTRACT: STOPS}), *IN_THE_POOL))
    assert answer["workloads"][0]["verdict"] == "FAILED"
    assert "RuntimeError: stopped by the head" in answer["workloads"][0]["reason"]
    assert answer["receipt"]["status"] == "CLEAN"
    waiting = place.trigger(place.permitted_head("", **{CONTRACT: WAITS}), "--grace", "2", *IN_THE_POOL)
    place.wait_for_a_living_worker(0)
    docker_engine.wait_for_container()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(place.flow_run(client), Cancelling(), force=True)
    answer = answer_of(waiting)
    assert answer["workloads"][0]["verdict"] == "INCOMPLETE"
    assert answer["workloads"][0]["reason"].startswith(("cancelled", "not finished"))  # whoever hears of it first
    assert answer["receipt"]["status"] == "CLEAN"
    assert place.holdings() == 0
    assert execute(["verify"]) == 0
    deadline = time.monotonic() + 30
    while docker_engine.containers():  # the engine removes the flow's own once Prefect has heard of its end
        assert time.monotonic() < deadline, "the flow's container is still there"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Request(ground=Ground.NATIVE), "'native': a flow in a docker pool has no leased GPU"),
        (Request(image="sha256:" + "a" * 64), "has no engine to start it with"),
    ],
)
def test_what_needs_a_leased_gpu_or_an_engine_is_refused_there_and_nowhere_else(asked: Request, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        require_possible(asked, DOCKER)
    require_possible(asked, "process")
    require_possible(asked, None)
