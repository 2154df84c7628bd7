"""Qualify in a forked process that is killed at a named boundary, as a host's out-of-memory killer would do it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import text

from db.engine import open_for_writing, writing
from flows import perform, pipeline, workload
from flows.progress import Progress
from flows.request import Request, validate
from qualification.execution import holding
from qualification.execution.attempt import Attempt
from qualification.execution.supervisor import read_census


def die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def before(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Die instead of calling ``owner.name``."""
    return lambda patch: patch.setattr(owner, name, die)


def after(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Die when ``owner.name`` has returned."""

    def install(patch: pytest.MonkeyPatch) -> None:
        call = getattr(owner, name)

        def then_die(*given: Any, **named: Any) -> None:
            call(*given, **named)
            die()

        patch.setattr(owner, name, then_die)

    return install


def with_its_supervisor(patch: pytest.MonkeyPatch) -> None:
    """Kill the supervisor and then the caller, at the first event of the worker."""

    def kill_both(*_: object) -> None:
        from qualification.home import home

        for path in home().glob("runs/*/*/*/census.json"):
            census = read_census(path.parent)
            assert census is not None
            os.kill(census.supervisor.pid, signal.SIGKILL)
        die()

    patch.setattr(Progress, "event", kill_both)


BOUNDARIES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "waiting for a lease": before(holding, "_queue"),
    "after lease": before(Attempt, "begin"),
    "after provision": after(perform, "create_worktree"),
    "mid-workload": before(Progress, "event"),
    "mid-workload, with its supervisor": with_its_supervisor,
    "before hashing": before(workload, "collect"),
    "after blob, before commit": before(perform, "_record"),
    "after commit, before teardown": before(perform, "retire_worktree"),
    "mid-teardown": after(perform, "retire_worktree"),
    "before receipt": before(Attempt, "take_receipt"),
    "after receipt, before its commit": after(Attempt, "take_receipt"),
    "after its commit, before the lease is closed": before(Attempt, "close"),
    "before decision": before(pipeline, "examine"),
}


def qualify_and_die(boundary: str, head: str, repository: Path, image: str | None = None) -> None:
    """Run one qualification in a child that dies at ``boundary``, and let its lease run out."""
    child = os.fork()
    if child == 0:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - the child never returns
        try:
            BOUNDARIES[boundary](pytest.MonkeyPatch())
            request = Request(head=head, repository=str(repository), timeout_seconds=60, grace_seconds=1, image=image)
            pipeline.qualify_once(*validate(request), Progress())
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child did not die"
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(ended[1]) == -signal.SIGKILL
    let_leases_run_out()


def let_leases_run_out() -> None:
    """Do what 30 seconds without a heartbeat do."""
    engine = open_for_writing()
    with writing(engine) as connection:
        connection.execute(text("UPDATE leases SET expires_at_ms = 0 WHERE closed_at_ms IS NULL"))
    engine.dispose()
