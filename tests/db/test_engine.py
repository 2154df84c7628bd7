"""Opening a database: what is missing, locked, full, damaged or not a database ends in one plain line."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from db import engine as engine_module
from db.engine import DatabaseError, open_for_reading, open_for_writing, read_url, reading, sqlite_url, writing
from qualification.errors import ConfigurationError
from qualification.evidence.findings import Code, InvalidEvidence
from tests import facts
from tests.databases import Workplace


def test_reading_where_nothing_was_recorded_says_so_and_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no evidence at"):
        open_for_reading(sqlite_url(tmp_path / "evidence.db"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["mysql://host/name", "no url", "sqlite+nothing:///file"])
def test_a_database_of_another_kind_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigurationError, match=r"database|driver"):
        open_for_writing(read_url(given))


def test_a_server_that_cannot_be_reached_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError) as raised:
        open_for_reading(read_url(f"postgresql://someone:hidden@/name?host={tmp_path}"))
    assert "cannot be reached" in str(raised.value)
    assert "hidden" not in str(raised.value)


def test_a_database_that_the_server_does_not_have_is_named(postgresql_url: URL) -> None:
    with pytest.raises(DatabaseError, match=r'cannot be reached: .*"absent" does not exist'):
        open_for_reading(postgresql_url.set(database="absent"))


def test_a_file_that_is_no_database_is_tampering(tmp_path: Path) -> None:
    path = tmp_path / "evidence.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(InvalidEvidence) as raised:
        open_for_reading(sqlite_url(path))
    assert raised.value.code is Code.DATABASE


def test_a_writer_waits_for_the_lock_and_then_says_who_holds_it_up(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LOCK_WAIT_SECONDS", 1)
    impatient = open_for_writing(workplace.url)
    with writing(workplace.engine):
        started = time.monotonic()
        with pytest.raises(DatabaseError, match="was locked by another process for 1 s"), writing(impatient):
            pass
        assert time.monotonic() - started >= 0.9
        with reading(impatient) as connection:  # readers go on
            assert connection.exec_driver_sql("SELECT count(*) FROM ledger").scalar_one() == 0
    with writing(impatient):
        pass
    impatient.dispose()


def test_a_writer_that_waits_gets_its_turn_while_a_reader_holds_a_transaction(workplace: Workplace) -> None:
    workplace.record(facts.receipt("run-0"))
    done: list[int] = []

    def write() -> None:
        done.append(workplace.record(facts.receipt("run-1"))[0].sequence)

    with reading(workplace.engine) as reader:
        before = reader.exec_driver_sql("SELECT count(*) FROM ledger").scalar_one()
        with writing(workplace.engine):
            writer = threading.Thread(target=write)
            writer.start()
            writer.join(0.3)
            assert done == []
        writer.join(20)
        assert done == [2]
        assert reader.exec_driver_sql("SELECT count(*) FROM ledger").scalar_one() == before == 1


def test_a_full_disk_is_said_in_one_line_and_records_nothing(sqlite_workplace: Workplace) -> None:
    sqlite_workplace.record(facts.receipt("run-0"))
    pages = sqlite3.connect(str(sqlite_workplace.url.database)).execute("PRAGMA page_count").fetchone()[0]
    with reading(sqlite_workplace.engine) as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")  # kept by this pooled connection
    with pytest.raises(DatabaseError, match="no room to write"):
        for number in range(1, 200):
            sqlite_workplace.record(facts.result(f"run-{number}"))
    sqlite_workplace.engine.dispose()
    assert sqlite_workplace.verify().verified


def test_processes_that_make_the_database_at_the_same_instant_make_one(workplace: Workplace) -> None:
    program = (
        "import sys, time; from db.engine import database_url, open_for_writing; from db.source import read_identity\n"
        "from db.engine import reading\n"
        "time.sleep(max(0, float(sys.argv[1]) - time.time()))\n"
        "with reading(open_for_writing(database_url())) as c: print(read_identity(c))"
    )
    start = str(time.time() + 3)
    command = [sys.executable, "-c", program, start]
    made = [subprocess.Popen(command, env=workplace.environment, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    identities = {process.communicate()[0] for process in made}
    assert [process.returncode for process in made] == [0] * 6
    assert len(identities) == 1
    if workplace.url.get_backend_name() == "sqlite":
        left = {path.name for path in workplace.home.iterdir()} - {"evidence.db", "evidence.db-wal", "evidence.db-shm"}
        assert left == set()
