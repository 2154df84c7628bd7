import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from qualification.execution.identity import find
from qualification.execution.supervision import Command, Ending, Limits, Outcome, Specification
from qualification.execution.supervisor import LeaseLost, read_census, supervise
from tests.data.escapees import KINDS
from tests.qualification.execution.supervising import DATA, run, run_python


def gone(outcome: Outcome) -> bool:
    return not any(find(process) for process in (*outcome.swept, *outcome.leftovers))


@pytest.mark.parametrize("kind", KINDS)
def test_every_escapee_is_swept_and_named(tmp_path: Path, kind: str) -> None:
    outcome = run(tmp_path, sys.executable, str(DATA / "escapees.py"), kind)
    assert (tmp_path / "rank-0.stdout.log").read_text() == "READY\n"
    assert (outcome.ending, outcome.exit_code, outcome.leftovers) == (Ending.EXITED, 0, ())
    assert len(outcome.swept) >= (50 if kind == "burst" else 1)
    assert (outcome.kill_ms or 0) <= 2000
    assert gone(outcome)


def test_a_killed_server_leaves_an_engine_and_workers_that_are_found_by_parentage(tmp_path: Path) -> None:
    outcome = run(tmp_path, sys.executable, str(DATA / "orphan_engine.py"))
    assert outcome.exit_code == -signal.SIGKILL
    assert {process.command for process in outcome.swept} == {"SRV::EngineCor", "SRV::Worker_TP0", "SRV::Worker_TP1"}
    assert gone(outcome)


def test_uninterruptible_processes_and_zombies_do_not_hold_the_sweep_up(tmp_path: Path) -> None:
    started = time.monotonic()
    outcome = run(tmp_path, "env", "HOLD=900", sys.executable, str(DATA / "uninterruptible.py"), wall_seconds=2)
    assert time.monotonic() - started < 2 + 1 + 10
    assert (outcome.ending, outcome.leftovers) == (Ending.TIMED_OUT, ())
    states = [process.state for process in outcome.swept]
    assert "uninterruptible" in states
    assert states.count("zombie") >= 20
    assert gone(outcome)


def test_a_limit_ends_the_command_and_says_which(tmp_path: Path) -> None:
    timed_out = run_python(tmp_path / "wall", "import time; time.sleep(60)", wall_seconds=1)
    assert (timed_out.ending, timed_out.exit_code) == (Ending.TIMED_OUT, -signal.SIGTERM)
    silent = run(tmp_path / "silent", "sh", "-c", "echo once; sleep 60", silence_seconds=1)
    assert (silent.ending, silent.reason) == (Ending.SILENT, "silent for 1 s")


def test_a_silent_build_is_called_by_the_lock_it_waits_on(tmp_path: Path) -> None:
    script = 'mkdir "$TORCH_EXTENSIONS_DIR/x" && touch "$TORCH_EXTENSIONS_DIR/x/lock"; sleep 60'
    outcome = run(tmp_path, "sh", "-c", script, silence_seconds=1)
    assert str(tmp_path / "caches/torch_extensions/x/lock") in (outcome.reason or "")


def test_output_over_the_limit_is_counted_not_kept(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sh", "-c", "head -c 300000 /dev/zero; echo err >&2", log_bytes=100_000)
    assert (tmp_path / "rank-0.stdout.log").stat().st_size == 100_000
    assert (tmp_path / "rank-0.stderr.log").read_text() == "err\n"
    assert outcome.dropped_bytes == {"rank-0.stdout.log": 200_000}


def test_a_command_that_cannot_start_is_an_outcome(tmp_path: Path) -> None:
    outcome = run(tmp_path, "/does/not/exist")
    assert (outcome.ending, outcome.exit_code) == (Ending.START_FAILED, None)
    assert "/does/not/exist" in (outcome.reason or "")


def script(folder: Path, text: str) -> Specification:
    environment = {"PATH": os.environ["PATH"]}
    return Specification(
        run="test",
        token=secrets.token_hex(8),
        folder=str(folder),
        command=Command(words=("bash", "-c", text), environment=environment),
        limits=Limits(terminate_seconds=1),
        working_folder=str(folder),
        events=True,
    )


def test_events_are_stamped_in_the_order_of_reading(tmp_path: Path) -> None:
    said = """printf '{"event":"a","n":1}\\nno json\\n{"event":"b"' >&$QUALIFY_EVENTS_FD"""
    assert supervise(script(tmp_path, said)).succeeded
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["sequence"] for line in lines] == [0, 1, 2]
    assert [line.get("event") for line in lines] == [{"event": "a", "n": 1}, None, None]
    assert [line.get("malformed") for line in lines] == [None, "no json", '{"event":"b"']
    stamps = [line["monotonic_ns"] for line in lines]
    assert stamps == sorted(stamps)


def test_closing_too_slowly_fails_with_what_was_alive(tmp_path: Path) -> None:
    asked = script(tmp_path, """echo '{"event":"closing"}' >&$QUALIFY_EVENTS_FD; sleep 60""")
    outcome = supervise(replace(asked, limits=Limits(terminate_seconds=1, close_seconds=1)))
    assert (outcome.ending, outcome.reason) == (Ending.CLOSE_TIMED_OUT, "close() did not return within 1 s")
    assert "sleep" in {process.command for process in outcome.swept}


def test_closing_several_times_in_time_is_no_reason_to_end(tmp_path: Path) -> None:
    arm = """echo '{"event":"closing"}'; echo '{"event":"close"}'; sleep 1;"""
    asked = script(tmp_path, f"{{ {arm} {arm} }} >&$QUALIFY_EVENTS_FD")
    assert supervise(replace(asked, limits=Limits(terminate_seconds=1, close_seconds=1))).succeeded


class Refusing:
    """An authority that is lost at the first renewal."""

    seconds = 2

    def renew(self) -> None:
        raise LeaseLost("lease lost: virtual:0 with token 1 expired 3 s ago")


class Silent:
    """An authority that cannot be renewed in time."""

    seconds = 2

    def renew(self) -> None:
        raise TimeoutError("database is locked")


def leased(folder: Path, seconds: int) -> Specification:
    return replace(script(folder, "sleep 60"), authority_seconds=seconds)


def test_a_lost_lease_ends_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qualification.execution.supervisor.RENEW_SECONDS", 0)
    outcome = supervise(leased(tmp_path, 60), authority=Refusing())
    assert outcome.ending is Ending.LEASE_LOST
    assert "expired 3 s ago" in (outcome.reason or "")
    assert gone(outcome)


def test_a_lease_that_cannot_be_renewed_runs_out(tmp_path: Path) -> None:
    started = time.monotonic()
    outcome = supervise(leased(tmp_path, 2), authority=Silent())
    assert outcome.ending is Ending.LEASE_LOST
    assert 1.5 < time.monotonic() - started < 20


def test_a_stopped_supervisor_lets_its_lease_run_out(tmp_path: Path) -> None:
    renewals = []

    class Counting:
        seconds = 2

        def renew(self) -> None:
            renewals.append(time.monotonic())

    def stop_and_wake() -> None:
        while (census := read_census(tmp_path)) is None or not census.processes:
            time.sleep(0.02)
        os.kill(census.supervisor.pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(census.supervisor.pid, signal.SIGCONT)

    helper = threading.Thread(target=stop_and_wake)
    helper.start()
    outcome = supervise(leased(tmp_path, 2), authority=Counting())
    helper.join()
    assert outcome.ending is Ending.LEASE_LOST
    assert gone(outcome)
    assert not renewals


def test_the_run_ends_when_its_caller_is_killed(tmp_path: Path) -> None:
    source = (
        "import sys; from pathlib import Path; from tests.qualification.execution.supervising import run; "
        "run(Path(sys.argv[1]), 'sleep', '60')"
    )
    caller = subprocess.Popen([sys.executable, "-c", source, str(tmp_path)])
    while (census := read_census(tmp_path)) is None or not census.processes:
        time.sleep(0.05)
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + 10
    while find(census.supervisor) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert json.loads((tmp_path / "outcome.json").read_text())["ending"] == "caller_gone"
    assert not any(find(process) for process in (*census.processes, census.supervisor))


def test_a_killed_supervisor_is_swept_up_after(tmp_path: Path) -> None:
    def kill() -> None:
        while (census := read_census(tmp_path)) is None or len(census.processes) < 2:
            time.sleep(0.02)
        os.kill(census.supervisor.pid, signal.SIGKILL)

    helper = threading.Thread(target=kill)
    helper.start()
    outcome = run(tmp_path, "env", "-i", "sh", "-c", "setsid sleep 61 & sleep 60")
    helper.join()
    assert outcome.ending is Ending.SUPERVISOR_LOST
    assert len(outcome.swept) >= 2
    assert gone(outcome)


def test_an_interrupted_caller_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt() -> None:
        if (census := read_census(tmp_path)) is not None and census.processes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise(leased(tmp_path, 60), progress=interrupt)
    census = read_census(tmp_path)
    assert census is not None
    assert not any(find(process) for process in (*census.processes, census.supervisor))


def test_nothing_of_the_callers_environment_passes_but_what_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    monkeypatch.setenv("QUALIFY_TRUST", "/keys")
    run(tmp_path, "env", token="0123abcd")
    seen = dict(line.split("=", 1) for line in (tmp_path / "rank-0.stdout.log").read_text().splitlines())
    assert "GITHUB_TOKEN" not in seen
    assert "QUALIFY_TRUST" not in seen
    assert seen["QUALIFY_RUN_TOKEN"] == "0123abcd"
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["NVIDIA_VISIBLE_DEVICES"]) == ("", "none")
    assert seen["TRITON_CACHE_DIR"].startswith(str(tmp_path))
