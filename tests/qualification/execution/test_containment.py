"""Parentage alone must do where a host has no cgroup v2; a scope is one more way, not the only one."""

import os
import secrets
import sys
from pathlib import Path

import msgspec
import pytest

from qualification.execution import cgroup, supervisor_process
from qualification.execution.environment import child_environment
from qualification.execution.identity import find
from qualification.execution.supervision import Command, Limits, Outcome, Specification, encode
from tests.qualification.execution.supervising import DATA


def supervise_without_scope(folder: Path, *command: str) -> Outcome:
    """Run the supervisor's own code in a forked child of ours in which no scope can be made."""
    specification = Specification(
        run="test",
        token=secrets.token_hex(8),
        folder=str(folder),
        command=Command(words=command, environment=child_environment(folder)),
        limits=Limits(terminate_seconds=1),
        working_folder=str(folder),
    )
    control, held = os.pipe()
    status, pulses = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(held)
            supervisor_process.create_scope = lambda _: (None, "subreaper only: as if there were none")
            outcome = supervisor_process.Supervisor(specification, control, pulses, None).run()
            (folder / "result.json").write_bytes(encode(outcome))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    for descriptor in (control, held, status, pulses):
        os.close(descriptor)
    return msgspec.json.decode((folder / "result.json").read_bytes(), type=Outcome)


@pytest.mark.parametrize("kind", ["double_fork", "re_exec", "burst"])
def test_escapees_are_found_by_parentage_alone(tmp_path: Path, kind: str) -> None:
    outcome = supervise_without_scope(tmp_path, sys.executable, str(DATA / "escapees.py"), kind)
    assert outcome.containment.startswith("subreaper only")
    assert (outcome.exit_code, outcome.leftovers) == (0, ())
    assert len(outcome.swept) >= (50 if kind == "burst" else 1)
    assert not any(find(process) for process in outcome.swept)


def test_an_engine_without_token_name_or_session_is_found_by_parentage_alone(tmp_path: Path) -> None:
    outcome = supervise_without_scope(tmp_path, sys.executable, str(DATA / "orphan_engine.py"))
    assert {process.command for process in outcome.swept} == {"SRV::EngineCor", "SRV::Worker_TP0", "SRV::Worker_TP1"}
    assert not any(find(process) for process in outcome.swept)


def test_a_host_without_the_hierarchy_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("30 24 0:26 / /sys/fs/cgroup/pids rw,nosuid - cgroup cgroup rw,pids\n")
    monkeypatch.setattr(cgroup, "MOUNTS", mounts)
    assert cgroup.create_scope("t") == (None, "subreaper only: no cgroup v2 hierarchy is mounted")
    mounts.write_text(f"30 24 0:26 / {tmp_path}/nowhere rw,nosuid - cgroup2 cgroup2 rw\n")
    scope, how = cgroup.create_scope("t")
    assert scope is None
    assert "not writable here" in how
