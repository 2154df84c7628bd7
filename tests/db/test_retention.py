"""Private originals are removed only through a signed tombstone, and evidence verifies before, during and after."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from db.retention import remove_private_blobs
from qualification.errors import ConfigurationError
from qualification.evidence.findings import Code
from qualification.evidence.sanitise import with_projection
from qualification.records import Artifact
from tests import facts
from tests.databases import Workplace

LOG = b"worker said token ghp_0123456789abcdefghij\n"


def _with_private_log(workplace: Workplace) -> tuple[Artifact, ...]:
    log = replace(facts.artifact(LOG, "worker.log"), media_type="text/plain")
    workplace.store.put(LOG)
    original, projection = with_projection(workplace.store, log)
    workplace.record(facts.result(artifacts=[original, projection]), facts.receipt())
    workplace.ledger.sign_head()
    return original, projection


def test_original_and_projection_are_both_hashed_and_the_original_can_go(workplace: Workplace) -> None:
    original, projection = _with_private_log(workplace)
    assert projection.projection_of == original.sha256
    assert workplace.verify().verified
    removed = remove_private_blobs(workplace.ledger, "run-1", "a year old", workplace.signer)
    assert removed == (original.sha256,)
    assert not workplace.store.has(original.sha256)
    assert b"ghp_" not in workplace.store.read(projection.sha256)
    shown = workplace.verify()
    assert (shown.first, shown.head, shown.size) == (None, 3, 3)
    with pytest.raises(ConfigurationError, match="keeps no private blobs"):
        remove_private_blobs(workplace.ledger, "run-1", "again", workplace.signer)


def test_an_original_that_just_vanished_is_missed(workplace: Workplace) -> None:
    original, projection = _with_private_log(workplace)
    workplace.store.path(original.sha256).unlink()
    found = workplace.verify().first
    assert found is not None
    assert (found.code, found.sequence) == (Code.BLOB_MISSING, 1)
    workplace.store.put(LOG)
    workplace.store.path(projection.sha256).unlink()
    found = workplace.verify().first
    assert found is not None
    assert found.place == f"blob {projection.sha256}"
