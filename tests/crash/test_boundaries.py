"""Whatever moment a run is killed at, one sweep closes it truthfully, and a second one changes nothing."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from db.engine import open_for_reading, reading
from db.leases import DatabaseLeaseStore
from db.models import ledger
from flows.cli.main import execute
from qualification.execution.sweep import carriers
from tests.crash.dying import BOUNDARIES, qualify_and_die
from tests.docker_engine import Engine
from tests.flows.subjects import Trainer

CLOSED_BY_ITSELF = ("before decision",)
UNRECORDED = (
    "waiting for a lease",
    "after lease",
    "after provision",
    "mid-workload",
    "mid-workload, with its supervisor",
    "before hashing",
    "after blob, before commit",
)

IN_CONTAINERS = (
    "after provision",
    "before hashing",
    "after commit, before teardown",
    "before receipt",
)
"""The boundaries at which it matters where the worker lived; ``test_docker`` kills in the middle of one."""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("crash") / "trainer")


def sweep(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    """Sweep until no attempt is left alone; an orphaned supervisor may still be at work at first."""
    deadline = time.monotonic() + 30
    while True:
        capsys.readouterr()
        code = execute(["sweep", "--json"])
        attempts = json.loads(capsys.readouterr().out)["attempts"]
        if all(attempt["receipt"] for attempt in attempts):
            return code, attempts
        assert time.monotonic() < deadline, attempts
        time.sleep(0.2)


def recorded(capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    execute(["evidence", "list", "--json"])
    return json.loads(capsys.readouterr().out)


def orphans(home: Path) -> set[str]:
    """Return the digests of raw data in the store that no entry of the ledger names."""
    engine = open_for_reading()
    with reading(engine) as connection:
        named = "".join(bytes(row).decode(errors="replace") for row in connection.scalars(select(ledger.c.envelope)))
    engine.dispose()
    payloads = "".join(base64.b64decode(part).decode() for part in re.findall(r'"payload":"([^"]+)"', named))
    return {path.name for path in home.glob("blobs/sha256/*") if path.name not in payloads}


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_one_sweep_closes_what_a_killed_run_left(
    private: Path,
    permit: Callable[[str], None],
    trainer: Trainer,
    capsys: pytest.CaptureFixture[str],
    boundary: str,
) -> None:
    head = trainer.head(f"# {boundary}\nraise RuntimeError('fails at once')")
    permit(head)
    qualify_and_die(boundary, head, trainer.folder)
    assert_one_sweep_closes(private, capsys, boundary)


@pytest.mark.docker
@pytest.mark.parametrize("boundary", IN_CONTAINERS)
def test_one_sweep_closes_what_a_killed_run_in_containers_left(
    private: Path,
    permit: Callable[[str], None],
    trainer: Trainer,
    docker_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    boundary: str,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine.host)
    head = trainer.head(f"# {boundary} in a container\nraise RuntimeError('fails at once')")
    permit(head)
    qualify_and_die(boundary, head, trainer.folder, docker_engine.image)
    assert_one_sweep_closes(private, capsys, boundary)
    assert docker_engine.containers() == []


def assert_one_sweep_closes(private: Path, capsys: pytest.CaptureFixture[str], boundary: str) -> None:
    code, attempts = sweep(capsys)
    assert code == 0
    assert len(attempts) == (0 if boundary in CLOSED_BY_ITSELF else 1)
    for attempt in attempts:
        assert (attempt["receipt"]["status"], attempt["receipt"]["recovered"]) == ("CLEAN", True)
    engine = open_for_reading()
    store = DatabaseLeaseStore(engine)
    assert store.holdings() == ()
    assert not any(resource.quarantine for resource in store.resources())
    engine.dispose()
    worktrees = private / "worktrees"
    assert not worktrees.exists() or not list(worktrees.iterdir())
    for manifest in private.glob("runs/*/*/attempt.json"):
        assert not carriers(json.loads(manifest.read_text())["token"])
    assert execute(["verify"]) == 0
    assert orphans(private) == set()
    before = recorded(capsys)
    assert ("INCOMPLETE" in json.dumps(before)) == (boundary in UNRECORDED)
    assert execute(["sweep"]) == 0
    assert recorded(capsys) == before
