"""A filled installation to tamper with, and what an intruder who can write the database and the blobs can do."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import asdict, replace
from securesystemslib.signer import CryptoSigner
from sqlalchemy import Connection, select

from db import models, protections
from db.check import verify_database
from db.engine import open_for_writing, sqlite_url
from db.projections import clear, insert, project
from qualification.evidence.authentic import authenticate
from qualification.evidence.canonical import canonical_bytes, evidence_root
from qualification.evidence.chain import Entry, genesis_hash, link
from qualification.evidence.findings import Finding, InvalidEvidence
from qualification.evidence.signing import add_signature, sign
from qualification.evidence.statements import Read, statement
from qualification.evidence.trust import Trust
from qualification.records import Decision, Tombstone, Verdict
from tests import facts
from tests.databases import Workplace

PRIVATE = b"worker.log with what must stay here"
REMOVED = b"removed on purpose"
SUFFIX = b" of run "


class Site(Workplace):
    """An installation on SQLite whose people are alice and bob; see :func:`fill` for what is in it."""

    alice = CryptoSigner.generate_ed25519()
    bob = CryptoSigner.generate_ed25519()

    @contextmanager
    def unprotected(self) -> Iterator[Connection]:
        """Change the database as its owner can: without triggers, which are back afterwards."""
        with self.engine.begin() as connection:
            protections.drop(connection)
            yield connection
            protections.create(connection)

    def entries(self) -> list[Entry]:
        with self.engine.begin() as connection:
            return [Entry(**row._mapping) for row in connection.execute(select(models.ledger).order_by("sequence"))]

    def rechain(self, change: Callable[[list[bytes]], Iterable[bytes]], keep: int = 0) -> None:
        """Replace the envelopes after the first ``keep``; compute chain and projections anew, which needs no key."""
        before = self.entries()
        root = before[keep - 1].hash if keep else genesis_hash(self.ledger.identity)
        with self.unprotected() as connection:
            without_constraints(connection)
            connection.exec_driver_sql(f"DELETE FROM ledger WHERE sequence > {keep}")
            made = before[:keep]
            for envelope in change([entry.envelope for entry in before[keep:]]):
                made.append(link(len(made) + 1, root, envelope))
                root = made[-1].hash
                connection.execute(models.ledger.insert().values(asdict(made[-1])))
            clear(connection)
            insert(connection, project(_readable(made, Trust.load(self.trust)), set()))

    def findings(self) -> list[Finding]:
        """Return what the product says; damage that stops the walk is one finding without a place."""
        self.engine.dispose()
        try:
            return list(verify_database(self.engine, self.store, self.trust).findings)
        except InvalidEvidence as error:
            return [Finding(code=error.code, place="evidence", text=error.text)]

    def copy(self, folder: Path) -> Site:
        """Copy the whole installation."""
        self.engine.dispose()
        shutil.copytree(self.home, folder / "home")
        shutil.copytree(self.trust, folder / "trust")
        return Site(folder / "home", folder / "trust", sqlite_url(folder / "home" / "evidence.db"))

    def blob(self, content: bytes) -> Path:
        return self.store.path(self.store.put(content))


def without_constraints(connection: Connection) -> None:
    """Make the ledger's table again without primary key and unique columns."""
    connection.exec_driver_sql("CREATE TABLE bare AS SELECT * FROM ledger")
    connection.exec_driver_sql("DROP TABLE ledger")
    connection.exec_driver_sql("ALTER TABLE bare RENAME TO ledger")


def _readable(entries: list[Entry], trust: Trust) -> Iterator[tuple[int, Read]]:
    for entry in entries:
        try:
            yield entry.sequence, authenticate(entry.envelope, trust).read
        except InvalidEvidence:
            continue


def fill(folder: Path) -> Site:
    """Record three runs: each a result, a receipt, alice's approval and a decision; sequences 1-4, 5-8 and 9-13.

    Bob signed the approval at 7 too. The first run FAILED; the third has a private artifact, and at 11 the tombstone of
    another one. Tree heads are signed at 0, 4, 8 and 13.
    """
    site = Site(folder / "home", folder / "trust", sqlite_url(folder / "home" / "evidence.db"))
    site.trust.mkdir(parents=True)
    people = {"alice": site.alice, "bob": site.bob}
    lines = [
        f'[people.{name}]\nroles = ["approver"]\nkeys = ["{signer.public_key.keyval["public"]}"]\n'
        for name, signer in people.items()
    ]
    (site.trust / "people.toml").write_text("".join(lines))
    assert open_for_writing(site.url)
    for number, verdict in enumerate((Verdict.FAILED, Verdict.PASSED, Verdict.PASSED)):
        _record_run(site, f"run-{number}", verdict)
        site.ledger.sign_head()
    return site


def _record_run(site: Site, run: str, verdict: Verdict) -> None:
    contents = [b"steps" + SUFFIX + run.encode(), b"more" + SUFFIX + run.encode()]
    artifacts = [facts.artifact(contents[0]), facts.artifact(contents[1], "Mähre.json")]
    if run == "run-2":
        contents += [PRIVATE, REMOVED]
        artifacts += [replace(facts.artifact(PRIVATE, "worker.log"), private=True), facts.artifact(REMOVED, "old.json")]
    for content in contents:
        site.store.put(content)
    result, receipt = site.record(facts.result(run, verdict=verdict, artifacts=artifacts), facts.receipt(run))
    root = evidence_root([result.envelope_sha256, receipt.envelope_sha256])
    if run == "run-2":
        removed = site.store.put(REMOVED)
        site.record(Tombstone(blobs=(removed,), reason="a year old", removed_at=facts.STAMP))
        site.store.remove(removed)
    word = replace(facts.approval("alice"), evidence_root=root, note=run)
    envelope = sign(statement(word), site.alice)
    site.ledger.append(add_signature(envelope, site.bob) if run == "run-1" else envelope)
    answer = Decision.ADOPTED if verdict is Verdict.PASSED else Decision.REJECTED
    site.record(replace(facts.decision(run, root, answer), ledger_size=receipt.sequence))


def payload_of(envelope: bytes) -> bytes:
    """Return the payload of a stored envelope without verifying it."""
    return base64.b64decode(json.loads(envelope)["payload"])


def forged(envelope: bytes, payload: bytes) -> bytes:
    """Return the envelope with another payload under the old signatures."""
    return canonical_bytes({**json.loads(envelope), "payload": base64.b64encode(payload).decode()})
