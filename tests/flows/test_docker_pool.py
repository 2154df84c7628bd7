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

HEAD = "assert os.getpid() != 1\nraise RuntimeError('stop')"


@pytest.fixture
def place(docker_engine: Engine, prefect_address: str, tmp_path: Path) -> Iterator[Place]:
    """Deploy what runs in containers and start a worker that makes them."""
    place = Place(tmp_path, prefect_address)
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
def test_a_head_is_qualified_in_a_container_of_a_docker_pool(
    place: Place, docker_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUALIFY_HOME", "QUALIFY_TRUST", "PREFECT_API_URL"):
        monkeypatch.setenv(name, place.environment[name])
    place.trainer = Trainer(place.home / "trainer")  # where the container sees it
    head = place.permitted_head(HEAD)
    answer = answer_of(place.trigger(head, "--deployment", "qualify/docker-pr-head"))
    assert answer["workloads"][0]["verdict"] == "FAILED"
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
