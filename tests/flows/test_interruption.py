"""Interrupted and killed runs: what the pipeline can still record it records, and a sweep records the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from db.engine import open_for_reading
from db.leases import DatabaseLeaseStore
from flows.cli.main import execute
from tests.crash.dying import let_leases_run_out
from tests.flows.subjects import Trainer

Permit = Callable[[str], None]
START_SECONDS = 60.0


def _start(trainer: Trainer, head: str, home: Path) -> subprocess.Popen[str]:
    """Start ``qualify run`` as a process of its own and return it once its worker is alive."""
    program = "from flows.cli.main import main; main()"
    command = [sys.executable, "-c", program, "run", "--head", head, "--repo", str(trainer.folder), "--grace", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
    )
    deadline = time.monotonic() + START_SECONDS
    while not list(home.glob("runs/*/*/full_step/output/alive")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the worker did not start"
        time.sleep(0.1)
    return process


def _recorded(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert execute(["evidence", "show", "--json"]) == 0
    shown: dict[str, object] = json.loads(capsys.readouterr().out)
    return shown


@pytest.fixture
def waiting(trainer: Trainer, permit: Permit) -> str:
    """Return a permitted head whose worker waits until somebody ends it."""
    head = trainer.head("Path(given['recordings'], 'alive').touch()\ntime.sleep(600)")
    permit(head)
    return head


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_an_interrupted_run_is_recorded_before_it_ends(
    with_server: Path,
    trainer: Trainer,
    waiting: str,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    process = _start(trainer, waiting, with_server)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    engine = open_for_reading()
    assert DatabaseLeaseStore(engine).holdings() == ()
    engine.dispose()
    shown = json.dumps(_recorded(capsys))
    assert "INCOMPLETE" in shown
    assert "CLEAN" in shown
    assert execute(["verify"]) == 0


def _servers(home: Path) -> list[str]:
    """Command lines of servers that were started for runs below ``home``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"flows.temporary_app" in command and os.fsencode(home) in environment:
            found.append(command.decode())
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_terminal_s_interrupt_and_a_kill_leave_no_temporary_server(
    private: Path, trainer: Trainer, waiting: str, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    process = _start(trainer, waiting, private)
    assert len(_servers(private)) == 1
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as Ctrl-C does: everyone in the foreground group hears it
    else:
        process.kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "unexpected" not in said
    deadline = time.monotonic() + 30
    while _servers(private):
        assert time.monotonic() < deadline, _servers(private)
        time.sleep(0.2)


def test_a_killed_run_is_closed_by_a_sweep_once_and_only_once(
    with_server: Path, trainer: Trainer, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    process = _start(trainer, waiting, with_server)
    process.kill()
    process.communicate(timeout=60)
    let_leases_run_out()
    deadline = time.monotonic() + 90
    capsys.readouterr()
    while True:  # its supervisor is still sweeping
        code = execute(["sweep", "--json"])
        attempts = json.loads(capsys.readouterr().out)["attempts"]
        if attempts and attempts[0]["receipt"]:
            break
        assert time.monotonic() < deadline, attempts
        time.sleep(1)
    assert code == 0
    assert (attempts[0]["receipt"]["status"], attempts[0]["receipt"]["recovered"]) == ("CLEAN", True)
    engine = open_for_reading()
    assert DatabaseLeaseStore(engine).holdings() == ()
    engine.dispose()
    before = _recorded(capsys)
    assert "INCOMPLETE" in json.dumps(before)
    assert execute(["sweep"]) == 0
    assert _recorded(capsys) == before
    assert execute(["verify"]) == 0
    assert not list((with_server / "worktrees").iterdir())
