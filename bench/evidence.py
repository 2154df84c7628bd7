"""How fast evidence is recorded and verified, on SQLite and PostgreSQL, against plain SQLAlchemy in the same run.

A bundle is one run: 20 artifacts of which 4 are files of 10 kB, one signed ledger entry; files, names and transaction
are on the disk when it counts. The peer writes 1 run, 20 artifacts and 1 event in one durable transaction, without
files, hashes, signatures or chain. Both alternate in rounds, and the median ratio is printed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, Text, create_engine, event
from sqlalchemy.engine import URL, make_url

from db.engine import sqlite_url
from tests import facts
from tests.databases import Workplace, private_database, private_postgresql

FILES, FILE_BYTES, ARTIFACTS, ROUNDS, PER_ROUND = 4, 10_000, 20, 6, 60
VERIFIED_RUNS = 10_000
WRITERS, PER_WRITER = 8, 60

_plain = MetaData()
_RUNS = Table("plain_runs", _plain, Column("run", String(40), primary_key=True), Column("started_at", Text))
_ARTIFACTS = Table(
    "plain_artifacts",
    _plain,
    Column("id", Integer, primary_key=True),
    *(Column(name, Text) for name in ("run", "name", "sha256", "media_type")),
    Column("size", Integer),
)
_EVENTS = Table("plain_events", _plain, Column("id", Integer, primary_key=True), Column("body", Text))
_BODY = "x" * 4096


def record_bundle(workplace: Workplace) -> None:
    """Record one run end to end, as the flow does: files first, then the signed entry that rests on them."""
    files = [os.urandom(FILE_BYTES) for _ in range(FILES)]
    for content in files:
        workplace.store.put(content)
    artifacts = [facts.artifact(files[number % FILES], f"file-{number}.json") for number in range(ARTIFACTS)]
    workplace.record(facts.result(f"run-{uuid4()}", artifacts=artifacts))


def record_plainly(engine: Engine) -> None:
    """Write the peer's rows in one transaction."""
    run = str(uuid4())
    row = {"run": run, "sha256": "a" * 64, "media_type": "application/json", "size": FILE_BYTES}
    with engine.begin() as connection:
        connection.execute(_RUNS.insert(), {"run": run, "started_at": facts.STAMP})
        connection.execute(_ARTIFACTS.insert(), [{**row, "name": f"file-{number}"} for number in range(ARTIFACTS)])
        connection.execute(_EVENTS.insert(), {"body": _BODY})


def _plain_engine(url: URL) -> Engine:
    engine = create_engine(url)
    if url.get_backend_name() == "sqlite":

        @event.listens_for(engine, "connect")
        def _durable(connection: object, _record: object) -> None:
            connection.execute("PRAGMA journal_mode = WAL")  # type: ignore[attr-defined]
            connection.execute("PRAGMA synchronous = FULL")  # type: ignore[attr-defined]

    _plain.create_all(engine)
    return engine


def _rate(work: Callable[[], None], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        work()
    return count / (time.perf_counter() - started)


def _workplace(folder: Path, url: URL | None = None) -> Workplace:
    made = Workplace(folder / "home", folder / "trust", url or sqlite_url(folder / "home" / "evidence.db"))
    made.trust.mkdir(parents=True)
    made.ledger.sign_head()
    return made


def one_writer(workplace: Workplace, engine: Engine) -> tuple[float, float]:
    """Return bundles/s of ours and the median ratio to the peer, alternating ours, peer, peer, ours."""
    ours, ratios = [], []
    for number in range(ROUNDS):
        works: dict[str, Callable[[], None]] = {
            "ours": lambda: record_bundle(workplace),
            "peer": lambda: record_plainly(engine),
        }
        order = list(works) if number % 2 == 0 else list(works)[::-1]
        rates = {who: _rate(works[who], PER_ROUND) for who in order}
        ours.append(rates["ours"])
        ratios.append(rates["ours"] / rates["peer"])
    return statistics.median(ours), statistics.median(ratios)


def many_writers(workplace: Workplace, who: str) -> float:
    """Return bundles/s of 8 processes that begin at the same instant on one database."""
    start = time.time() + 6
    environment = {**workplace.environment, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "bench.evidence", who, str(start)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(WRITERS)]
    ends = [float(process.communicate()[0]) for process in running]
    assert all(process.returncode == 0 for process in running)
    return WRITERS * PER_WRITER / (max(ends) - start)


def _write_as_one_of_many(who: str, start: float) -> None:
    environment = os.environ
    home, trust = Path(environment["QUALIFY_HOME"]), Path(environment["QUALIFY_TRUST"])
    url = make_url(environment["QUALIFY_DATABASE"]).set(drivername="postgresql+psycopg")
    workplace = Workplace(home, trust, url)
    engine = create_engine(url)
    workplace.ledger.sign_head()
    while time.time() < start:
        time.sleep(0.0005)
    for _ in range(PER_WRITER):
        if who == "ours":
            record_bundle(workplace)
        else:
            record_plainly(engine)
    print(time.time())


def verification(workplace: Workplace, runs: int) -> tuple[float, float]:
    """Return seconds to verify everything of ``runs`` runs, and the ratio to reading the same rows and files."""
    for _ in range(runs):
        record_bundle(workplace)
    workplace.ledger.sign_head()
    started = time.perf_counter()
    shown = workplace.verify()
    seconds = time.perf_counter() - started
    assert shown.verified, str(shown.first)
    assert shown.size >= runs
    return seconds, seconds / _read_plainly(workplace)


def _read_plainly(workplace: Workplace) -> float:
    """Time reading every row of every table and every blob, with nothing checked."""
    started = time.perf_counter()
    with workplace.engine.connect() as connection:
        for name in ("ledger", "runs", "workload_results", "criteria", "artifacts", "device_uses"):
            for _ in connection.exec_driver_sql(f"SELECT * FROM {name}"):
                pass
    for name in workplace.store.names():
        workplace.store.path(name).read_bytes()
    return time.perf_counter() - started


def main() -> None:
    """Print one line per figure."""
    print("bundle: 1 run, 20 artifacts, 4 files of 10 kB, 1 ledger entry; ratio to plain SQLAlchemy rows, same run")
    with tempfile.TemporaryDirectory() as folder:
        workplace = _workplace(Path(folder))
        rate, ratio = one_writer(workplace, _plain_engine(sqlite_url(Path(folder) / "plain.db")))
        print(f"SQLite, 1 writer: {rate:.0f} durable bundles/s, {ratio:.2f} of the peer (goal: 150/s)")
        seconds, times = verification(workplace, VERIFIED_RUNS)
        print(f"SQLite, verify {VERIFIED_RUNS} runs: {seconds:.1f} s, {times:.1f} times plain reading (goal: 10 s)")
    with tempfile.TemporaryDirectory() as folder, private_postgresql() as server, private_database(server) as url:
        workplace = _workplace(Path(folder), url)
        plain = _plain_engine(url)
        rate, ratio = one_writer(workplace, plain)
        print(f"PostgreSQL, 1 writer: {rate:.0f} durable bundles/s, {ratio:.2f} of the peer")
        ours, peer = many_writers(workplace, "ours"), many_writers(workplace, "peer")
        print(
            f"PostgreSQL, {WRITERS} writers: {ours:.0f} durable bundles/s, {ours / peer:.2f} of the peer (goal: 100/s)"
        )
        assert workplace.verify().verified
        seconds, times = verification(workplace, VERIFIED_RUNS)
        print(f"PostgreSQL, verify {VERIFIED_RUNS} runs: {seconds:.1f} s, {times:.1f} times plain reading (goal: 10 s)")
        plain.dispose()
        workplace.engine.dispose()


if __name__ == "__main__":
    _write_as_one_of_many(sys.argv[1], float(sys.argv[2]))
