import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from qualification.execution.identity import boot_id, find, myself, read_entry, record, send, starts_with


@pytest.fixture
def awkward(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process whose name holds brackets, a space and digits, as if it were a line of the process table."""
    program = tmp_path / ") R 1 (x"
    shutil.copy("/bin/sleep", program)
    process = subprocess.Popen([program, "60"], env={"TOKEN": "abc"})
    while (entry := read_entry(process.pid)) is None or entry.command != ") R 1 (x":
        time.sleep(0.01)
    return process


def test_a_name_cannot_pose_as_other_fields(awkward: subprocess.Popen[bytes]) -> None:
    entry = read_entry(awkward.pid)
    assert entry is not None
    assert (entry.parent, entry.state) == (os.getpid(), "running")
    awkward.kill()
    deadline = time.monotonic() + 10
    while (gone := read_entry(awkward.pid)) is not None and gone.state != "zombie":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    awkward.wait()
    assert read_entry(awkward.pid) is None


def test_a_process_of_another_start_or_boot_is_another_one() -> None:
    me = myself()
    assert find(me) is not None
    assert find(replace(me, start_ticks=me.start_ticks + 1)) is None
    assert find(replace(me, boot_id="an earlier one")) is None
    assert me.boot_id == boot_id()


def test_a_signal_reaches_exactly_the_process_that_was_meant() -> None:
    process = subprocess.Popen(["sleep", "60"])
    entry = read_entry(process.pid)
    assert entry is not None
    assert not send(entry._replace(start_ticks=entry.start_ticks + 1), signal.SIGKILL)
    assert process.poll() is None
    assert send(entry, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not send(entry, signal.SIGKILL)


def test_a_token_is_a_whole_variable_not_a_part_of_one() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"TOKEN": "abcdef", "X": "1"}
    )
    try:
        deadline = time.monotonic() + 10
        while not starts_with(process.pid, "TOKEN", "abcdef"):
            assert time.monotonic() < deadline
        assert not starts_with(process.pid, "TOKEN", "abc")
        assert not starts_with(process.pid, "OKEN", "abcdef")
        assert not starts_with(2**22 - 5, "TOKEN", "abcdef")
    finally:
        process.communicate()


def test_a_stopped_process_is_recorded_as_running() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        while (entry := read_entry(process.pid)) is None or entry.state != "stopped":
            time.sleep(0.01)
        assert record(entry).state == "running"
        assert record(entry, state="foreign").state == "foreign"
    finally:
        process.kill()
        process.wait()
