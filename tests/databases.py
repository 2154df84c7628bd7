"""Real databases for tests: a SQLite file, and a database of a private PostgreSQL server, through one fixture."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from uuid import uuid4

import pytest
from securesystemslib.signer import CryptoSigner
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import URL

from db.check import verify_database
from db.engine import open_for_writing, read_url, sqlite_url
from db.ledger import Ledger
from qualification.evidence.blobs import BlobStore
from qualification.evidence.chain import Entry
from qualification.evidence.signing import pipeline_signer, sign
from qualification.evidence.statements import Fact, statement
from qualification.evidence.verify import Verification
from qualification.records import Subject
from tests import facts

BINARIES = Path("/usr/lib/postgresql/15/bin")
PORT = 5432


@dataclass
class Workplace:
    """A home, a trust folder and a database of its own, as one installation of the product has them."""

    home: Path
    trust: Path
    url: URL

    @cached_property
    def engine(self) -> Engine:
        return open_for_writing(self.url)

    @cached_property
    def store(self) -> BlobStore:
        return BlobStore(self.home)

    @cached_property
    def signer(self) -> CryptoSigner:
        return pipeline_signer(self.trust)

    @cached_property
    def ledger(self) -> Ledger:
        facts.store_documents(self.store)
        return Ledger(self.engine, self.store, self.trust, self.signer)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment in which a command uses this workplace."""
        database = self.url.set(drivername=self.url.get_backend_name()).render_as_string(hide_password=False)
        return {
            **os.environ,
            "QUALIFY_HOME": str(self.home),
            "QUALIFY_TRUST": str(self.trust),
            "QUALIFY_DATABASE": database,
        }

    def record(self, *recorded: Fact, source: Subject | None = None) -> tuple[Entry, ...]:
        known = source or facts.subject()
        return self.ledger.append_all([sign(statement(fact, known), self.signer) for fact in recorded])

    def verify(self, *, since_head: bool = False) -> Verification:
        return verify_database(self.engine, self.store, self.trust, since_head=since_head)


def _as_server(arguments: list[str | Path]) -> None:
    """Run a server command; PostgreSQL refuses to be root, so root becomes nobody."""
    user = "nobody" if os.geteuid() == 0 else None
    done = subprocess.run(arguments, check=False, user=user, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr + done.stdout


@contextmanager
def private_postgresql() -> Iterator[Path]:
    """Run a PostgreSQL 15 that listens on a socket only; the value is the socket's folder."""
    folder = Path(tempfile.mkdtemp(prefix="qualify-postgresql-", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
    try:
        _as_server([BINARIES / "initdb", "-D", folder / "data", "-U", "postgres", "-A", "trust", "--no-sync"])
        options = f"-k {folder} -p {PORT} -c listen_addresses='' -c max_connections=50"
        control = [BINARIES / "pg_ctl", "-D", folder / "data", "-w"]
        _as_server([*control, "-l", folder / "log", "-o", options, "start"])
        yield folder
        _as_server([*control, "-m", "immediate", "stop"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def private_database(server: Path) -> Iterator[URL]:
    """Make an empty database on a private server, and drop it afterwards."""
    url = read_url(f"postgresql://postgres@/postgres?host={server}&port={PORT}")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    name = f"qualify_{uuid4().hex}"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    yield url.set(database=name)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    engine.dispose()


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Path]:
    """Give the socket folder of one server for the session."""
    with private_postgresql() as folder:
        yield folder


@pytest.fixture
def postgresql_url(postgresql_server: Path) -> Iterator[URL]:
    """Give an empty database."""
    with private_database(postgresql_server) as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> URL:
    """Give the URL of a database that does not exist yet (SQLite) or is empty (PostgreSQL)."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "home" / "evidence.db")
    url: URL = request.getfixturevalue("postgresql_url")
    return url


@pytest.fixture
def workplace(database_url: URL, tmp_path: Path) -> Iterator[Workplace]:
    """Give a fresh installation on each kind of database."""
    made = Workplace(tmp_path / "home", tmp_path / "trust", database_url)
    made.trust.mkdir()
    yield made
    made.engine.dispose()


@pytest.fixture
def sqlite_workplace(tmp_path: Path) -> Iterator[Workplace]:
    """Give a fresh installation on SQLite alone, for what does not depend on the database."""
    made = Workplace(tmp_path / "home", tmp_path / "trust", sqlite_url(tmp_path / "home" / "evidence.db"))
    made.trust.mkdir()
    yield made
    made.engine.dispose()
