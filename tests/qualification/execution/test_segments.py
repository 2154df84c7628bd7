import mmap
import os
import secrets
from pathlib import Path

import pytest

from qualification.execution.receipt import Footprint, take_receipt
from qualification.execution.segments import FOLDER, mapped_segments, open_segments, remaining, remove
from qualification.execution.supervision import Ending
from qualification.records import ReceiptStatus
from tests.qualification.execution.supervising import run_python


@pytest.fixture
def name() -> str:
    return f"qualify-test-{secrets.token_hex(6)}"


def test_a_segment_that_a_killed_process_leaves_is_removed_and_named(tmp_path: Path, name: str) -> None:
    source = f"""
import time
from multiprocessing import resource_tracker, shared_memory
held = shared_memory.SharedMemory({name!r}, create=True, size=4096)
resource_tracker.unregister(held._name, "shared_memory")
time.sleep(60)
"""
    outcome = run_python(tmp_path, source, wall_seconds=2)
    assert outcome.ending is Ending.TIMED_OUT
    assert [segment.path for segment in outcome.segments] == [str(FOLDER / name)]
    assert not (FOLDER / name).exists()
    receipt = take_receipt(Footprint(run="r", attempt=1, token="t0k3n", folders=(tmp_path,), outcomes=(outcome,)))
    (probe,) = [probe for probe in receipt.probes if probe.name == "shared_memory"]
    assert receipt.status is ReceiptStatus.CLEAN
    assert probe.values["removed"] == (str(FOLDER / name),)


def test_a_segment_that_is_mapped_and_closed_is_removed_and_named(tmp_path: Path, name: str) -> None:
    source = f"""
import ctypes, os, time
file = os.open("/dev/shm/{name}", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
library = ctypes.CDLL(None)
library.mmap.restype = ctypes.c_void_p
assert library.mmap(None, 4096, 3, 1, file, 0) != ctypes.c_void_p(-1).value
os.close(file)
time.sleep(60)
"""
    outcome = run_python(tmp_path, source, wall_seconds=2)
    assert [segment.path for segment in outcome.segments] == [str(FOLDER / name)]
    assert not (FOLDER / name).exists()


def test_a_segment_that_was_there_before_or_is_still_open_elsewhere_stays(tmp_path: Path, name: str) -> None:
    segment = FOLDER / name
    segment.touch()
    try:
        outcome = run_python(
            tmp_path, f"import time; held = open({str(segment)!r}, 'a'); held.write('x'); held.flush(); time.sleep(1.5)"
        )
        assert outcome.segments == ()
        with segment.open("a"):
            mine = open_segments([os.getpid()])
            (found,) = [one for one in mine if one.path == str(segment)]
            assert remove([found]) == ()
            assert remaining([found]) == (found,)
        with segment.open("r+b") as file, mmap.mmap(file.fileno(), 1) as view:
            file.close()
            assert view.size() == 1
            assert mapped_segments([os.getpid()]) >= {found}
            assert remove([found]) == ()
        assert remove([found]) == (found,)
        assert remaining([found]) == ()
    finally:
        segment.unlink(missing_ok=True)


def test_a_later_segment_of_the_same_name_is_another_one(name: str) -> None:
    segment = FOLDER / name
    with segment.open("w"):
        (found,) = [one for one in open_segments([os.getpid()]) if one.path == str(segment)]
    try:
        other = FOLDER / f"{name}-other"
        other.touch()
        other.replace(segment)
        assert remaining([found]) == ()
    finally:
        segment.unlink()
