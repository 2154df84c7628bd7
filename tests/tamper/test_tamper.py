"""Each kind of tampering is found, with its code, place and sequence; untouched evidence verifies."""

from __future__ import annotations

from pathlib import Path

import pytest

from qualification.evidence.findings import Code
from tests.tamper.corpus import CORPUS, Kind
from tests.tamper.site import Site, fill


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = fill(tmp_path_factory.mktemp("site"))
    assert site.findings() == []
    return site


@pytest.fixture
def site(filled: Site, tmp_path: Path) -> Site:
    return filled.copy(tmp_path)


def test_a_copied_home_verifies_under_the_same_trust(site: Site) -> None:
    assert site.findings() == []


def test_the_corpus_is_large_and_each_kind_is_another() -> None:
    assert len(CORPUS) >= 25
    assert len({kind.name for kind in CORPUS}) == len(CORPUS)
    not_here = {Code.BUNDLE, Code.CLOCK_BEHIND}  # found in bundles, and by the clock
    assert {kind.code for kind in CORPUS} == set(Code) - not_here


@pytest.mark.parametrize("kind", CORPUS, ids=lambda kind: kind.name)
def test_it_is_found(site: Site, kind: Kind) -> None:
    kind.apply(site)
    findings = site.findings()
    assert findings, "not found at all"
    first = findings[0]
    assert (first.code, first.sequence) == (kind.code, kind.sequence), str(first)
    assert first.place.startswith(kind.place), str(first)
