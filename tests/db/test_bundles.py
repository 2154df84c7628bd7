"""A bundle brings a run's history into another database of either kind, and nothing that must stay at home."""

from __future__ import annotations

from dataclasses import replace as with_changes
from pathlib import Path

import pytest
from msgspec.structs import replace

from db.bundles import export_bundle, import_bundle
from db.engine import reading, sqlite_url
from db.queries import decisions_of, entries_of, find_run
from qualification.errors import ConfigurationError, TamperedError
from qualification.evidence.bundle import read_bundle
from qualification.evidence.canonical import evidence_root
from qualification.evidence.trust import accept_public_key
from qualification.records import Decision, ReceiptStatus, Verdict
from tests import facts
from tests.databases import Workplace

PRIVATE = b"private log"


def _record_history(workplace: Workplace) -> None:
    """Record a run that failed, was held, ran again and was decided again, between entries of other runs."""
    workplace.store.put(PRIVATE)
    private = replace(facts.artifact(PRIVATE, "worker.log"), private=True)
    failed = facts.result(verdict=Verdict.FAILED, artifacts=[private])
    first = workplace.record(failed, facts.receipt(status=ReceiptStatus.DIRTY))
    _decide(workplace, [entry.envelope_sha256 for entry in first], Decision.REJECTED)
    workplace.record(facts.result("other"), facts.receipt("other"))
    second = workplace.record(replace(facts.result(), attempt=2), replace(facts.receipt(), attempt=2))
    _decide(workplace, [entry.envelope_sha256 for entry in (*first, *second)], Decision.HELD)
    workplace.ledger.sign_head()


def _decide(workplace: Workplace, digests: list[str], answer: Decision) -> None:
    workplace.record(facts.decision(root=evidence_root(digests), answer=answer))


def _other(workplace: Workplace, tmp_path: Path) -> Workplace:
    other = with_changes(
        workplace,
        home=tmp_path / "other" / "home",
        trust=tmp_path / "other" / "trust",
        url=sqlite_url(tmp_path / "other" / "home" / "evidence.db"),
    )
    other.trust.mkdir(parents=True)
    return other


def test_a_run_keeps_its_history_in_another_database(workplace: Workplace, tmp_path: Path) -> None:
    _record_history(workplace)
    path = tmp_path / "run-1.tar"
    exported = export_bundle(workplace.ledger, "run-1", path)
    assert (exported.entries, exported.head, exported.withheld) == (6, 8, 1)
    bundle = read_bundle(path)
    other = _other(workplace, tmp_path)
    other.record(facts.receipt("its own"))
    with pytest.raises(TamperedError, match="signer-unknown"):
        import_bundle(other.ledger, bundle, other.signer)
    assert other.verify().size == 1

    accept_public_key(other.trust, bundle.keys[0])
    other = _reopened(other)
    done = import_bundle(other.ledger, bundle, other.signer)
    assert (len(done.entries), done.known) == (7, 0)  # six, and the tombstone of what was withheld
    assert not other.store.has(facts.artifact(PRIVATE).sha256)
    shown = other.verify()
    assert (shown.first, shown.size, shown.head) == (None, 8, 8)
    with reading(workplace.engine) as here, reading(other.engine) as there:
        assert [one[1:] for one in entries_of(here, "run-1")] == [one[1:] for one in entries_of(there, "run-1")]
        assert find_run(there, "run-1").commit == facts.COMMIT
        assert [line.decision for line in decisions_of(there, "run-1")] == ["held", "rejected"]

    again = import_bundle(other.ledger, bundle, other.signer)
    assert (again.entries, again.known) == ((), 6)
    onward = tmp_path / "onward.tar"
    assert export_bundle(other.ledger, "run-1", onward).verified


def _reopened(workplace: Workplace) -> Workplace:
    workplace.engine.dispose()
    return Workplace(workplace.home, workplace.trust, workplace.url)


def test_the_same_evidence_gives_the_same_file(workplace: Workplace, tmp_path: Path) -> None:
    _record_history(workplace)
    for name in ("one.tar", "two.tar"):
        export_bundle(workplace.ledger, "run-1", tmp_path / name)
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_a_run_that_is_not_recorded_or_a_file_that_exists_is_refused(workplace: Workplace, tmp_path: Path) -> None:
    _record_history(workplace)
    with pytest.raises(ConfigurationError, match="'run-9' is not recorded here"):
        export_bundle(workplace.ledger, "run-9", tmp_path / "absent.tar")
    taken = tmp_path / "taken.tar"
    taken.write_text("mine")
    with pytest.raises(ConfigurationError, match="exists; name a file that does not"):
        export_bundle(workplace.ledger, "run-1", taken)
    assert taken.read_text() == "mine"
    assert [path.name for path in tmp_path.glob("*.tar")] == ["taken.tar"]
    with pytest.raises(ConfigurationError, match="give a bundle's file"):
        read_bundle(tmp_path / "absent.tar")


def test_evidence_that_does_not_verify_is_not_exported(workplace: Workplace, tmp_path: Path) -> None:
    _record_history(workplace)
    workplace.store.path(facts.DOCUMENT_SHA256).write_bytes(b"other rules")
    with pytest.raises(TamperedError):
        export_bundle(workplace.ledger, "run-1", tmp_path / "bad.tar")
    assert list(tmp_path.glob("*.tar")) == []
