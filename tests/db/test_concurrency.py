"""Writers at the same instant, one with a wrong clock, some killed: no fork, no hole, no loss, and verify passes.

The writers are processes of their own; ``QUALIFY_TEST_APPENDS`` sets how much each appends (50 for the whole case).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import select

from db import models
from db.engine import open_for_reading, reading
from tests.databases import Workplace

WRITERS = 8
APPENDS = int(os.environ.get("QUALIFY_TEST_APPENDS", "6"))
PROGRAM = Path(__file__).with_name("writer.py")


def _start(workplace: Workplace, names: list[str], *prefix: str, start: float) -> list[subprocess.Popen[str]]:
    environment = {**workplace.environment, "PYTHONPATH": str(PROGRAM.parents[2])}
    return [
        subprocess.Popen(
            [*prefix, sys.executable, str(PROGRAM), name, str(APPENDS), str(start)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]


def _sequences(workplace: Workplace) -> list[int]:
    with reading(open_for_reading(workplace.url)) as connection:
        return list(connection.scalars(select(models.ledger.c.sequence).order_by(models.ledger.c.sequence)))


def test_eight_writers_into_an_empty_ledger(workplace: Workplace) -> None:
    faketime = shutil.which("faketime")
    assert faketime, "install faketime: one of the writers must have a wrong clock"
    start = time.time() + 4
    processes = _start(workplace, [f"writer-{number}" for number in range(WRITERS - 1)], start=start)
    processes += _start(workplace, ["slow-clock"], faketime, "-f", "-1h", start=start - 3600)
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [error for _, error in outputs] == [""] * WRITERS
    assert [process.returncode for process in processes] == [0] * WRITERS
    told = sorted(int(line) for output, _ in outputs for line in output.split())
    assert told == _sequences(workplace) == list(range(1, WRITERS * APPENDS + 1))
    shown = workplace.verify()
    assert (shown.first, shown.size, shown.head) == (None, WRITERS * APPENDS, WRITERS * APPENDS)


def test_verify_passes_while_writers_write_and_after_some_are_killed(workplace: Workplace) -> None:
    assert workplace.ledger  # the database and the key are there before the writers come
    processes = _start(workplace, [f"writer-{number}" for number in range(4)], start=0)
    verified = 0
    while any(process.poll() is None for process in processes):
        shown = workplace.verify()
        assert shown.verified, str(shown.first)
        verified += 1
        if verified == 3 or shown.size > APPENDS:
            for process in processes[:2]:
                process.send_signal(signal.SIGKILL)
    told = sorted(int(line) for process in processes for line in process.communicate()[0].split())
    stored = _sequences(workplace)
    assert stored == list(range(1, len(stored) + 1))
    assert set(told) <= set(stored), "an entry that a killed writer had been told of is lost"
    assert workplace.verify().verified
    assert verified >= 2
    assert any(process.returncode == -signal.SIGKILL for process in processes)


def test_a_copy_of_the_files_of_a_killed_writer_keeps_what_was_committed(
    sqlite_workplace: Workplace, tmp_path: Path
) -> None:
    """A power cut leaves the database file and its write-ahead log as they are; a copy of them must open and verify."""
    assert sqlite_workplace.ledger
    (process,) = _start(sqlite_workplace, ["writer"], start=0)
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(APPENDS // 2)]
    process.send_signal(signal.SIGSTOP)
    copy = Workplace(tmp_path / "copy", sqlite_workplace.trust, sqlite_workplace.url)
    shutil.copytree(sqlite_workplace.home, copy.home)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    copy.url = copy.url.set(database=str(copy.home / "evidence.db"))
    assert (copy.home / "evidence.db-wal").stat().st_size > 0
    assert set(told) <= set(_sequences(copy))
    assert copy.verify().verified


@pytest.mark.parametrize("keep", ["none", "half"])
def test_a_write_ahead_log_that_was_cut_loses_only_what_was_not_sealed(
    sqlite_workplace: Workplace, tmp_path: Path, keep: str
) -> None:
    """What a signed tree head speaks for cannot vanish in silence with the log; what follows it may."""
    (process,) = _start(sqlite_workplace, ["writer"], start=0)
    process.communicate()
    copy = Workplace(tmp_path / "copy", sqlite_workplace.trust, sqlite_workplace.url)
    engine = sqlite_workplace.engine
    with engine.connect() as connection:  # an open reader keeps the log from being folded in on close
        connection.exec_driver_sql("SELECT count(*) FROM ledger").scalar_one()
        (late,) = _start(sqlite_workplace, ["late"], start=0)
        late.communicate()
        shutil.copytree(sqlite_workplace.home, copy.home)
    log = copy.home / "evidence.db-wal"
    size = log.stat().st_size
    assert size > 0
    os.truncate(log, 0 if keep == "none" else size // 2)
    copy.url = copy.url.set(database=str(copy.home / "evidence.db"))
    shown = copy.verify()
    assert shown.first is not None
    assert shown.first.code.value == "truncated"
