"""Random damage: one flipped bit anywhere in the evidence is found; evidence that nobody touched never raises an alarm.

``QUALIFY_TEST_FLIPS`` and ``QUALIFY_TEST_LEDGERS`` set how many; docs/evidence.md gives the command of the full counts.
"""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from db import models
from db.engine import sqlite_url
from qualification.evidence.findings import Code
from qualification.evidence.signing import sign
from qualification.evidence.statements import Fact, statement
from qualification.records import Decision, ReceiptStatus, Tombstone, Verdict
from tests import facts
from tests.databases import Workplace
from tests.tamper.site import Site, fill

FLIPS = int(os.environ.get("QUALIFY_TEST_FLIPS", "80"))
LEDGERS = int(os.environ.get("QUALIFY_TEST_LEDGERS", "6"))
TABLES = (models.identity, models.ledger, *models.PROJECTIONS)
SEED = 7


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return fill(tmp_path)


def _flipped(value: bytes, randomness: random.Random) -> bytes:
    place = randomness.randrange(len(value))
    return value[:place] + bytes([value[place] ^ (1 << randomness.randrange(8))]) + value[place + 1 :]


def _in_a_file(path: Path, randomness: random.Random) -> Callable[[], None]:
    """Flip a bit of a file, and return what restores it."""
    original = path.read_bytes()
    path.write_bytes(_flipped(original, randomness))
    return lambda: path.write_bytes(original) and None


def _in_a_row(site: Site, randomness: random.Random) -> Callable[[], None] | None:
    """Flip a bit of one stored value, as it is encoded; None when the database itself refuses the change."""
    table = randomness.choice(TABLES)
    with site.unprotected() as connection:
        rows = connection.exec_driver_sql(f"SELECT rowid, * FROM {table.name}").all()
        if not rows:
            return None
        row = randomness.choice(rows)
        name = randomness.choice(table.columns.keys())
        value = row._mapping[name]
        if value is None or value == "":
            return None
        if isinstance(value, int):
            cast, new = "?", value ^ (1 << randomness.randrange(8))
        else:
            raw = value if isinstance(value, bytes) else value.encode()
            cast, new = ("?" if isinstance(value, bytes) else "CAST(? AS TEXT)"), _flipped(raw, randomness)
        update = f'UPDATE {table.name} SET "{name}" = {cast} WHERE rowid = ?'
        try:
            connection.exec_driver_sql(update, (new, row[0]))
        except Exception as error:
            assert "constraint failed" in str(error)
            return None
    rowid = new if isinstance(value, int) and table.primary_key.columns.keys() == [name] else row[0]
    old = value if isinstance(value, int | bytes) else value.encode()

    def restore() -> None:
        with site.unprotected() as connection:
            connection.exec_driver_sql(update, (old, rowid))

    return restore


def test_one_flipped_bit_of_what_is_stored_is_found(site: Site) -> None:
    randomness = random.Random(SEED)
    files = [site.store.folder / name for name in site.store.names()] + sorted(site.ledger.heads.folder.iterdir())
    done = 0
    while done < FLIPS:
        file = randomness.choice(files)
        restore = _in_a_file(file, randomness) if randomness.random() < 0.4 else _in_a_row(site, randomness)
        if restore is None:
            continue
        assert site.findings(), f"flip {done} was not found"
        restore()
        done += 1
    assert site.findings() == []


def test_one_flipped_bit_of_the_database_file_is_found_or_changes_nothing_that_is_stored(site: Site) -> None:
    """A file has bytes that mean nothing: free space, counters. Whatever is stored must be the same, or it is found."""
    randomness = random.Random(SEED)
    site.engine.dispose()
    path = site.home / "evidence.db"
    original, stored = path.read_bytes(), _dump(path)
    found = 0
    for number in range(FLIPS if FLIPS > 1000 else FLIPS // 2):
        path.write_bytes(_flipped(original, randomness))
        if site.findings():
            found += 1
        else:
            assert _dump(path) == stored, f"flip {number} changed what is stored and was not found"
        site.engine.dispose()
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    assert found > 0


def _dump(path: Path) -> list[object]:
    with sqlite3.connect(path) as connection:
        return [connection.execute(f"SELECT * FROM {table.name} ORDER BY 1, 2").fetchall() for table in TABLES]


def _random_facts(randomness: random.Random, workplace: Workplace) -> Iterator[Fact]:
    """Yield facts in any order that a run, or several at once, may record them in."""
    for number in range(randomness.randrange(1, 9)):
        run = f"run-{randomness.randrange(3)}"
        content = randomness.randbytes(randomness.randrange(0, 2000))
        digest = workplace.store.put(content)
        made = facts.result(
            run,
            workload=randomness.choice(["full_step", "pressure", "Größe"]),
            verdict=randomness.choice(list(Verdict)),
            artifacts=[facts.artifact(content, f"ä{number}.json")] * randomness.randrange(3),
            started_at=f"20{randomness.randrange(10, 99)}-01-01T00:00:00Z",
        )
        made = replace(made, reason=randomness.choice([None, "", "line\nbreak", "\u2028 𝄞 \x7f"]), attempt=number)
        yield randomness.choice(
            [
                made,
                facts.receipt(run, randomness.choice(list(ReceiptStatus)), taken_at=f"2026-01-0{number + 1}T00:00:00Z"),
                facts.decision(run, f"{number:064x}", randomness.choice(list(Decision))),
                Tombstone(blobs=(f"{number:064x}", digest), reason="to save space", removed_at=facts.STAMP),
            ]
        )


@pytest.mark.parametrize("seed", range(LEDGERS))
def test_untouched_evidence_raises_no_alarm(tmp_path: Path, seed: int) -> None:
    randomness = random.Random(seed)
    workplace = Workplace(tmp_path / "home", tmp_path / "trust", sqlite_url(tmp_path / "home" / "evidence.db"))
    workplace.trust.mkdir()
    for fact in _random_facts(randomness, workplace):
        envelope = sign(statement(fact, facts.subject()), workplace.signer)
        for one in workplace.ledger.unrecorded([envelope]):
            workplace.ledger.append(one)
        if randomness.random() < 0.3:
            workplace.ledger.sign_head()
        shown = workplace.verify(since_head=randomness.random() < 0.3)
        assert shown.verified, str(shown.first)
    assert workplace.verify().first is None
    workplace.engine.dispose()


def test_the_codes_of_random_damage_are_among_those_that_are_explained(site: Site) -> None:
    randomness = random.Random(SEED + 1)
    codes = set()
    for _ in range(20):
        restore = _in_a_row(site, randomness)
        if restore is not None:
            codes |= {finding.code for finding in site.findings()}
            restore()
    assert codes <= set(Code)
    assert len(codes) > 1
