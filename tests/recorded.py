"""An installation with people in it: results, receipts and words signed and appended as the product does."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from securesystemslib.signer import CryptoSigner

from db.deciding import Case, examine
from db.ledger import Ledger
from flows.cli.main import execute
from qualification.evidence.canonical import sha256
from qualification.evidence.signing import sign
from qualification.evidence.statements import Fact, statement
from qualification.records import (
    Approval,
    Artifact,
    Basis,
    Criterion,
    Ground,
    Lease,
    Policy,
    Probe,
    ProbeStatus,
    Receipt,
    ReceiptStatus,
    Subject,
    Verdict,
    WorkloadResult,
)
from tests.databases import Workplace

COMMIT, OTHER_COMMIT = "c" * 40, "d" * 40
RULES = b"""
format = 1
name = "small"
description = "one workload"
[freshness]
days = 14000
[approvals]
people = 1
valid_days = 7
[[workloads]]
name = "full_step"
ground = "native"
[[workloads.criteria]]
name = "backwards"
direction = "equal"
value = 18
unit = "backwards"
shortfall = "INCOMPLETE"
[probes]
process = ["processes"]
"""
PEOPLE = """
[people.ada]
roles = ["approver"]
keys = ["{ada}"]
identities = ["ada@example.org"]
[people.bo]
roles = ["approver"]
keys = ["{bo}"]
[people.author]
roles = ["approver"]
keys = ["{author}"]
identities = ["author@example.org"]
[people.viewer]
roles = ["viewer"]
keys = ["{viewer}"]
"""
NAMES = ("ada", "bo", "author", "viewer", "stranger")


class Said(NamedTuple):
    """What a command answered."""

    returncode: int
    stdout: str
    stderr: str


class Recorded:
    """An installation with people; the private key of each lies in ``keys/<name>``, in OpenSSH's form."""

    def __init__(self, workplace: Workplace, keys: Path) -> None:
        self.workplace, self.keys = workplace, keys
        self.people = {name: Ed25519PrivateKey.generate() for name in NAMES}
        keys.mkdir(mode=0o700)
        for name, key in self.people.items():
            path = keys / name
            path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
            path.chmod(0o600)
        public = {
            name: key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
            for name, key in self.people.items()
        }
        (workplace.trust / "people.toml").write_text(PEOPLE.format(**public))

    @property
    def ledger(self) -> Ledger:
        """Return the ledger, with everybody's keys known."""
        return self.workplace.ledger

    def blob(self, content: bytes) -> str:
        """Store bytes and return their digest."""
        return self.workplace.store.put(content)

    def examine(self, run: str | None = None, *, address: str | None = None) -> Case:
        """Put a run before the gate as the commands do."""
        place = self.workplace
        return examine(place.engine, place.store, place.trust, run=run, address=address)

    def command(self, *arguments: str) -> Said:
        """Run a ``qualify`` command line in this installation; in this process, which starts no interpreter."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
        with (
            mock.patch.dict(os.environ, self.workplace.environment),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = execute(arguments)
        written = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return Said(int(code), *written)

    def append(self, *facts: Fact, source: Subject | None = None) -> list[int]:
        """Sign facts with the pipeline's key, append them, seal the ledger, and return their sequences."""
        entries = self.workplace.record(*facts, source=source)
        self.ledger.sign_head()
        return [entry.sequence for entry in entries]

    def say(self, name: str, word: Approval) -> int:
        """Append a person's word, signed with the key of ``name``."""
        entry = self.ledger.append(sign(statement(word), CryptoSigner(self.people[name])))
        self.ledger.sign_head()
        return entry.sequence

    def run(
        self,
        name: str,
        *,
        result: WorkloadResult | None = None,
        receipt: Receipt | None = None,
        source: Subject | None = None,
        **changed: object,
    ) -> list[int]:
        """Record one run: a result and a clean receipt, changed as given."""
        made = msgspec.structs.replace(result or self.result(), run=name, **changed)
        proof = msgspec.structs.replace(receipt or RECEIPT, run=name, attempt=made.attempt)
        return self.append(made, proof, source=source or SOURCE)

    def result(self) -> WorkloadResult:
        """Return a native PASSED result whose documents are stored."""
        log = b"step 1 of 3\n"
        return WorkloadResult(
            run="unnamed",
            attempt=1,
            workload="full_step",
            ground=Ground.NATIVE,
            policy=Policy(name="forecast", sha256=self.blob(b"policy")),
            rules_sha256=self.blob(RULES),
            verdict=Verdict.PASSED,
            criteria=CRITERIA,
            artifacts=(Artifact(name="log.txt", sha256=self.blob(log), size=len(log), media_type="text/plain"),),
            leases=(Lease(resource="gpu-0", token=1),),
            environment_sha256=self.blob(b"environment"),
            started_at="2026-11-30T11:00:00Z",
            duration_ms=1500,
            exit_code=0,
            requested_by="requester",
            card="NVIDIA H200",
        )


SOURCE = Subject(
    repository="example.org/training",
    commit=COMMIT,
    tree="e" * 40,
    dirty=False,
    files={"trainer_rank/__init__.py": sha256(b"")},
    manifest_sha256=sha256(b"manifest"),
    authors=("author@example.org",),
)
CRITERIA = (
    Criterion(
        name="backwards",
        verdict=Verdict.PASSED,
        basis=Basis.RECOMPUTED,
        measured=18,
        threshold=18,
        direction="equal",
        unit="backwards",
    ),
    Criterion(
        name="allocated_worst_error",
        verdict=Verdict.PASSED,
        basis=Basis.RECOMPUTED,
        measured="0.125",
        threshold="5",
        direction="at_most",
        unit="%",
    ),
)
RECEIPT = Receipt(
    run="unnamed",
    attempt=1,
    status=ReceiptStatus.CLEAN,
    swept=(),
    leftovers=(),
    probes=(Probe(name="processes", source="/proc", status=ProbeStatus.CLEAN, duration_ms=2),),
    leases=(Lease(resource="gpu-0", token=1),),
    exit_code=0,
    timed_out=False,
    taken_at="2026-11-30T11:01:00Z",
    provider="process",
)


@pytest.fixture
def recorded(workplace: Workplace, tmp_path: Path) -> Recorded:
    """Give an installation with people, on each kind of database."""
    return Recorded(workplace, tmp_path / "keys")


@pytest.fixture
def recorded_here(sqlite_workplace: Workplace, tmp_path: Path) -> Recorded:
    """Give an installation with people on SQLite alone, for what does not depend on the database."""
    return Recorded(sqlite_workplace, tmp_path / "keys")
