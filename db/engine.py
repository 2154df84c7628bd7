"""Open the evidence database: SQLite under ``$QUALIFY_HOME``, or whatever ``$QUALIFY_DATABASE`` names.

Writers take the one write lock *before* they read (``BEGIN IMMEDIATE``; an advisory lock on PostgreSQL), so that a read
never has to become a write, and wait for it. Reading never imports Alembic: the schema's revision is compared as text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from qualification.errors import ConfigurationError, QualificationError
from qualification.evidence.findings import Code, InvalidEvidence
from qualification.home import home

REVISIONS = ("0001", "0002", "0003", "0004", "0005")
"""Every schema revision in order, oldest first; the last is the one this program reads and writes."""

LOCK_WAIT_SECONDS = 45
_ADVISORY_LOCK = 0x7175616C696679  # "qualify" in ASCII
_FILE_NAME = "evidence.db"
_LOCKED = ("database is locked", "lock timeout")
_FULL = ("database or disk is full", "No space left on device")
_DAMAGED = (
    "database disk image is malformed",
    "malformed database schema",
    "file is not a database",
    "Could not decode",
    "no such table",
    "no such column",
    'relation "',
    'column "',
)
_UNREACHABLE = ("connection", "unable to open", 'database "', 'role "')


class DatabaseError(QualificationError):
    """The database cannot be used now: locked for too long, its disk full, or not to be reached (exit 1)."""


def database_url() -> URL:
    """Return where the evidence database is: ``$QUALIFY_DATABASE``, or ``evidence.db`` under the home folder."""
    given = os.environ.get("QUALIFY_DATABASE")
    return read_url(given) if given else sqlite_url(home() / _FILE_NAME)


def sqlite_url(path: Path) -> URL:
    """Return the URL of a SQLite file."""
    return URL.create("sqlite", database=str(path))


def read_url(given: str) -> URL:
    """Read a database URL, and refuse by name what is neither SQLite nor PostgreSQL."""
    try:
        url = make_url(given)
    except ArgumentError:
        raise ConfigurationError(
            "the database URL cannot be read; give sqlite:///FILE or postgresql://HOST/NAME"
        ) from None
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigurationError(f"the database {url.get_backend_name()!r} is not supported; use sqlite or postgresql")
    if url.get_backend_name() == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise ConfigurationError(f"the database driver {url.drivername!r} is not supported; use sqlite")
    return url


def open_for_reading(url: URL | None = None) -> Engine:
    """Open an existing database without changing it.

    Raises ConfigurationError (exit 2) when there is none yet, or when its schema is not the one this program knows.
    """
    url = url or database_url()
    _require_file(url)
    engine = _engine(url)
    _require_revision(engine, stored_revision(engine))
    return engine


def open_for_writing(url: URL | None = None) -> Engine:
    """Open a database for writing; create it, or bring an older schema up to date, first."""
    url = url or database_url()
    if _is_file(url) and not Path(str(url.database)).exists():
        _create_file(url)
    engine = _engine(url)
    found = stored_revision(engine)
    if found is None or (found in REVISIONS and found != REVISIONS[-1]):
        upgrade(engine)
        found = stored_revision(engine)
    _require_revision(engine, found)
    return engine


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Bring the schema to ``revision`` in one transaction that excludes every other writer."""
    from db.migrations.run import migrate

    with writing(engine) as connection:
        migrate(connection, revision)


def stored_revision(engine: Engine) -> str | None:
    """Return the schema revision that the database carries, None for an empty database."""
    with reading(engine) as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Give a connection with one consistent view of the database. Raises DatabaseError."""
    with _plain_errors(engine), engine.connect() as connection, connection.begin():
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Give a connection that holds the write lock; commits at the end, or leaves nothing. Raises DatabaseError."""
    with _plain_errors(engine), engine.connect().execution_options(write=True) as connection, connection.begin():
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_WAIT_SECONDS}s'")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
        yield connection


@contextmanager
def _plain_errors(engine: Engine) -> Iterator[None]:
    place = engine.url.render_as_string(hide_password=True)
    try:
        yield
    except UnicodeDecodeError as error:  # damage can reach names that SQLite quotes in its own messages
        raise InvalidEvidence(Code.DATABASE, f"{place} is damaged: {error}") from None
    except DBAPIError as error:
        said = str(error.orig).splitlines()[0] if error.orig else type(error).__name__
        if any(word in said for word in _LOCKED):
            raise DatabaseError(
                f"{place} was locked by another process for {LOCK_WAIT_SECONDS} s; end that process, or try again"
            ) from None
        if any(word in said for word in _FULL):
            raise DatabaseError(f"no room to write {place}; free some space and run again") from None
        if said.startswith(_DAMAGED):
            raise InvalidEvidence(Code.DATABASE, f"{place} is damaged: {said}") from None
        if error.connection_invalidated or any(word in said for word in _UNREACHABLE):
            raise DatabaseError(f"{place} cannot be reached: {said}") from None
        raise


def _engine(url: URL) -> Engine:
    try:
        engine = create_engine(url)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigurationError(f"no driver for {url.drivername}: {error}; install the extra [pipeline]") from None
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: object, _record: object) -> None:
    connection.isolation_level = None  # type: ignore[attr-defined]  # transactions begin in _begin_sqlite alone
    for setting in (f"busy_timeout = {LOCK_WAIT_SECONDS * 1000}", "synchronous = FULL", "recursive_triggers = ON"):
        connection.execute(f"PRAGMA {setting}")  # type: ignore[attr-defined]


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _is_file(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")


def _require_file(url: URL) -> None:
    if _is_file(url) and not Path(str(url.database)).exists():
        raise ConfigurationError(f"there is no evidence at {url.database} yet; qualify run records some")


def _create_file(url: URL) -> None:
    """Build the whole schema aside and then give the file its name, so that several first writers cannot collide."""
    path = Path(str(url.database))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_name(f".{path.name}-{os.getpid()}-{os.urandom(4).hex()}")
    engine = _engine(sqlite_url(aside))
    try:
        with engine.connect() as connection:
            connection.connection.driver_connection.execute("PRAGMA journal_mode = WAL")  # type: ignore[union-attr]
        upgrade(engine)
        engine.dispose()  # folds the write-ahead log into the file
        os.link(aside, path)
    except FileExistsError:
        pass  # another first writer was quicker; its database is the one
    finally:
        engine.dispose()
        for suffix in ("", "-wal", "-shm"):
            path.with_name(aside.name + suffix).unlink(missing_ok=True)


def _require_revision(engine: Engine, found: str | None) -> None:
    if found == REVISIONS[-1]:
        return
    place = engine.url.render_as_string(hide_password=True)
    engine.dispose()
    if found in REVISIONS or found is None:
        raise ConfigurationError(
            f"{place} has schema {found or 'none'}, this program needs {REVISIONS[-1]}; run qualify db migrate"
        )
    raise ConfigurationError(
        f"{place} has schema {found}, newer than {REVISIONS[-1]} that this program knows; use a newer qualify"
    )
