"""``qualify verify``, ``bundle`` and ``db`` as commands: exit codes, one line on stderr, JSON on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qualification.evidence.canonical import evidence_root
from qualification.records import Publication
from tests import facts
from tests.databases import Workplace, sqlite_workplace

__all__ = ["sqlite_workplace"]


PUBLICATION = Publication(
    run="run-1",
    commit=facts.COMMIT,
    context="qualify/forecast",
    state="pending",
    description="held",
    published=True,
    published_at=facts.STAMP,
)


def _qualify(workplace: Workplace, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from flows.cli.main import main; main()", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=workplace.environment, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def filled(sqlite_workplace: Workplace) -> Workplace:
    sqlite_workplace.store.put(b"steps")
    result, receipt = sqlite_workplace.record(facts.result(artifacts=[facts.artifact(b"steps")]), facts.receipt())
    root = evidence_root([result.envelope_sha256, receipt.envelope_sha256])
    sqlite_workplace.record(facts.decision(root=root))
    sqlite_workplace.ledger.sign_head()
    return sqlite_workplace


def test_verify_says_what_it_checked(filled: Workplace) -> None:
    done = _qualify(filled, "verify")
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified everything: ledger of 3 entries, 2 blobs, signed tree head at 3" in done.stdout
    done = _qualify(filled, "verify", "--since-head")
    assert "only what follows sequence 3" in done.stdout
    shown = json.loads(_qualify(filled, "verify", "--json").stdout)
    assert (shown["schema"], shown["verified"], shown["size"], shown["first"]) == ("qualify.verify/1", True, 3, None)


def test_tampering_ends_with_5_and_the_first_bad_sequence(filled: Workplace) -> None:
    filled.store.path(facts.artifact(b"steps").sha256).write_bytes(b"other")
    done = _qualify(filled, "verify")
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
    assert "sequence 1, blob" in done.stderr
    shown = json.loads(_qualify(filled, "verify", "--json").stdout)
    assert (shown["first"]["sequence"], shown["first"]["code"]) == (1, "blob-altered")


def test_a_damaged_database_ends_with_5(filled: Workplace) -> None:
    path = filled.home / "evidence.db"
    filled.engine.dispose()
    path.write_bytes(path.read_bytes()[:5000])
    done = _qualify(filled, "verify", "--json")
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["first"]["code"] == "database"


def test_nothing_recorded_and_a_newer_schema_end_with_2(sqlite_workplace: Workplace, filled: Workplace) -> None:
    with filled.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    for command in (["verify"], ["evidence", "list"], ["db", "rebuild"], ["gate", "check"]):
        done = _qualify(filled, *command)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "ffffffffffff" in done.stderr
    (filled.home / "evidence.db").unlink()
    done = _qualify(filled, "verify")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_rebuild_migrate_and_sign_head(filled: Workplace) -> None:
    with filled.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM decisions")
    assert _qualify(filled, "verify").returncode == 5
    assert "rebuilt from 3 ledger entries" in _qualify(filled, "db", "rebuild").stdout
    assert "signed tree head 3" in _qualify(filled, "db", "sign-head").stdout
    filled.record(PUBLICATION)
    assert _qualify(filled, "db", "migrate", "--to", "0002").stdout.startswith("schema 0002")
    assert _qualify(filled, "verify").returncode == 2
    assert _qualify(filled, "db", "migrate", "--to", "9999").returncode == 2
    assert _qualify(filled, "db", "migrate").returncode == 0
    assert _qualify(filled, "verify").returncode == 0


def test_a_bundle_goes_out_and_comes_in_by_command(filled: Workplace, tmp_path: Path) -> None:
    path = str(tmp_path / "run.tar")
    done = _qualify(filled, "bundle", "export", "run-1", "--output", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert _qualify(filled, "bundle", "export", "run-1", "--output", path).returncode == 2
    assert _qualify(filled, "bundle", "verify", path).returncode == 0
    assert _qualify(filled, "bundle", "export", "nothing").returncode == 2
    other = Workplace(tmp_path / "h", tmp_path / "t", filled.url.set(database=str(tmp_path / "h" / "evidence.db")))
    refused = _qualify(other, "bundle", "import", path)
    assert (refused.returncode, refused.stderr.count("\n")) == (5, 1)
    assert _qualify(other, "bundle", "import", path, "--accept", "0" * 64).returncode == 2
    shown = json.loads(
        _qualify(other, "bundle", "import", path, "--accept", filled.signer.public_key.keyid, "--json").stdout
    )
    assert (shown["schema"], shown["verified"], shown["entries"]) == ("qualify.bundle/1", True, 3)
    assert _qualify(other, "verify").returncode == 0


def test_a_database_that_stays_locked_ends_with_1_and_one_line(filled: Workplace) -> None:
    program = (
        "import sys; import db.engine as e; e.LOCK_WAIT_SECONDS = 1; from flows.cli.main import execute; "
        "sys.exit(execute(['db', 'rebuild']))"
    )
    with filled.engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
        connection.rollback()
        with connection.execution_options(write=True).begin():
            done = subprocess.run(
                [sys.executable, "-c", program], env=filled.environment, capture_output=True, text=True, check=False
            )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "locked by another process" in done.stderr
