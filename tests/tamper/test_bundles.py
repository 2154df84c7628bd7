"""A bundle that was tampered with, or made from evidence that was, is refused by both verifiers for one reason."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from db.bundles import export_bundle, gather, write_contents
from db.source import read_identity, stored_evidence
from qualification.errors import ConfigurationError, TamperedError
from qualification.evidence import bundle as bundle_module
from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.findings import InvalidEvidence
from qualification.evidence.heads import TreeHeads
from qualification.evidence.trust import Trust
from tests.tamper.corpus import CORPUS, Kind
from tests.tamper.judges import TOOL, ours, theirs
from tests.tamper.site import Site, fill

Members = list[tuple[tarfile.TarInfo, bytes]]
FLIPS = int(os.environ.get("QUALIFY_TEST_FLIPS", "150"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return fill(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def bundle(filled: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "run-2.tar"
    assert export_bundle(filled.ledger, "run-2", path).verified
    return path


def _export_unverified(site: Site, run: str, path: Path) -> bool:
    """Put a run into a bundle as it is stored; False when so much is damaged that it cannot be gathered."""
    try:
        trust = Trust.load(site.trust)
        with stored_evidence(site.engine) as source:
            heads = TreeHeads(site.trust, read_identity(source.connection)).read(trust)
            write_contents(gather(source, heads, site.store, trust, run), site.store, path)
    except (InvalidEvidence, ConfigurationError, OSError, ValueError):
        return False
    return True


@pytest.mark.parametrize("kind", CORPUS, ids=lambda kind: kind.name)
def test_both_verifiers_agree_on_a_bundle_of_tampered_evidence(filled: Site, tmp_path: Path, kind: Kind) -> None:
    site = filled.copy(tmp_path)
    kind.apply(site)
    site.engine.dispose()
    run = f"run-{min(((kind.sequence or 5) - 1) // 4, 2)}"
    path = tmp_path / "bundle.tar"
    if _export_unverified(site, run, path):
        assert ours(path, site.trust) == theirs(path, site.trust)
        assert kind.place != "envelope" or theirs(path, site.trust) is not None
    else:
        with pytest.raises((TamperedError, ConfigurationError, OSError)):
            export_bundle(site.ledger, run, tmp_path / "refused.tar")


def test_a_bundle_verifies_with_nothing_but_the_single_file(bundle: Path, filled: Site, tmp_path: Path) -> None:
    alone = shutil.copy(TOOL, tmp_path / "verify_bundle.py")
    command = [sys.executable, "-I", str(alone), str(bundle)]
    trusted = subprocess.run(
        [*command, "--trust", str(filled.trust)], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "verifies: run run-2, 7 entries up to tree head 13, 3 blobs" in trusted.stdout
    ids = [signer.public_key.keyid for signer in (filled.signer, filled.alice)]
    accepted = subprocess.run([*command, "--accept", *ids], capture_output=True, cwd=tmp_path, check=False)
    assert accepted.returncode == 0
    nobody = subprocess.run([*command, "--accept", "0" * 64], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (nobody.returncode, nobody.stdout.count("\n")) == (5, 1)
    unasked = subprocess.run(command, capture_output=True, cwd=tmp_path, check=False)
    assert unasked.returncode == 2


def test_the_verifier_is_one_small_file() -> None:
    lines = TOOL.read_text().splitlines()
    assert len(lines) <= 300
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported - set(sys.stdlib_module_names) - {"__future__"} == {"cryptography"}


def test_private_blobs_stay_at_home(bundle: Path, filled: Site) -> None:
    content = bundle.read_bytes()
    assert b"what must stay here" not in content
    manifest = bundle_module.read_bundle(bundle).manifest
    assert len(manifest.withheld) == 1
    assert filled.store.has(manifest.withheld[0])


def _rewritten(source: Path, target: Path, change: Callable[[Members], Members]) -> Path:
    with tarfile.open(source) as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in change(members):
            if member.isreg():
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return target


def _renamed(name: str, new: str) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        for member, _ in members:
            if member.name.startswith(name):
                member.name = new
        return members

    return change


def _odd(kind: bytes, name: str = "blobs/sha256/" + "a" * 64) -> Callable[[Members], Members]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return lambda members: [*members, (member, b"")]


def _manifest(**changes: object) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        made = []
        for member, content in members:
            if member.name == "bundle.json":
                old = json.loads(content)
                new = {name: value(old[name]) if callable(value) else value for name, value in changes.items()}
                content = canonical_bytes({**old, **new})
            made.append((member, content))
        return made

    return change


def _without(start: str) -> Callable[[Members], Members]:
    return lambda members: [(member, content) for member, content in members if not member.name.startswith(start)]


def _both(*changes: Callable[[Members], Members]) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        for one in changes:
            members = one(members)
        return members

    return change


def _with_ids_swapped(held: bytes) -> bytes:
    keys = json.loads(held)
    keys[0]["keyid"], keys[1]["keyid"] = keys[1]["keyid"], keys[0]["keyid"]
    return canonical_bytes(keys)


def _without_number(sequence: int) -> Callable[[Members], Members]:
    """Leave an entry out of the manifest and of the archive."""
    listed = _manifest(entries=lambda old: [one for one in old if one != sequence])
    return _both(listed, _without(f"entries/{sequence:012d}"))


def _content(name: str, change: Callable[[bytes], bytes]) -> Callable[[Members], Members]:
    return lambda members: [(one, change(held) if one.name.startswith(name) else held) for one, held in members]


MUTATIONS: dict[str, tuple[str, Callable[[Members], Members]]] = {
    "symbolic link": ("bundle", _odd(tarfile.SYMTYPE)),
    "hard link": ("bundle", _odd(tarfile.LNKTYPE)),
    "device": ("bundle", _odd(tarfile.CHRTYPE)),
    "pipe": ("bundle", _odd(tarfile.FIFOTYPE)),
    "folder": ("bundle", _odd(tarfile.DIRTYPE, "blobs")),
    "name with two dots": ("bundle", _renamed("blobs/sha256/", "blobs/../../evil")),
    "absolute name": ("bundle", _renamed("keys.json", "/keys.json")),
    "name with a newline": ("bundle", _renamed("keys.json", "keys.json\n")),
    "member twice": ("bundle", lambda members: [*members, members[1]]),
    "blob twice": ("bundle", lambda members: [*members, members[-1]]),
    "blob added": ("blob-altered", lambda members: [*members, (tarfile.TarInfo("blobs/sha256/" + "a" * 64), b"more")]),
    "entry added": ("bundle", lambda members: [*members, (tarfile.TarInfo("entries/000000000099.json"), b"{}")]),
    "no manifest": ("bundle", _without("bundle.json")),
    "no head": ("bundle", _without("head.json")),
    "no keys": ("bundle", _without("keys.json")),
    "blob left out": ("bundle", _without("blobs/")),
    "entry left out": ("bundle", _without("entries/000000000010")),
    "nothing at all": ("bundle", lambda members: []),
    "blob edited": ("blob-altered", _content("blobs/", lambda held: held + b" ")),
    "entry edited": ("entry-hash", _content("entries/", lambda held: held + b" ")),
    "entry with another payload": ("entry-hash", _content("entries/", lambda held: held.replace(b"eyJ", b"eyK"))),
    "head edited": ("tree-head", _content("head.json", lambda held: held.replace(b"eyJ", b"eyK"))),
    "head emptied": ("tree-head", _content("head.json", lambda held: b"")),
    "keys swapped": ("key-altered", _content("keys.json", _with_ids_swapped)),
    "manifest with other spacing": ("not-canonical", _content("bundle.json", lambda held: held.replace(b",", b", "))),
    "manifest that is a list": ("bundle", _content("bundle.json", lambda held: b"[]")),
    "manifest of another format": ("bundle", _manifest(format="qualify-bundle/2")),
    "manifest with a field more": ("bundle", _manifest(more=1)),
    "another ledger": ("tree-head", _manifest(ledger="f47ac10b-58cc-4372-a567-0e02b2c3d479")),
    "another run": ("bundle", _manifest(run="run-9")),
    "another root": ("rewritten", _manifest(root="d" * 64)),
    "another start": ("bundle", _manifest(after=1)),
    "chain cut": ("truncated", _both(_manifest(chain=lambda old: old[:-1]), _without_number(13))),
    "chain longer": ("rewritten", _manifest(chain=lambda old: [*old, "e" * 64])),
    "chain reordered": ("entry-hash", _manifest(chain=lambda old: [*old[1::-1], *old[2:]])),
    "chain with a repeat": ("repeated", _manifest(chain=lambda old: [*old[:-1], old[0]])),
    "chain of no digests": ("bundle", _manifest(chain=lambda old: ["x" for _ in old])),
    "entries out of order": ("bundle", _manifest(entries=lambda old: old[::-1])),
    "no entries": ("bundle", _both(_manifest(entries=[]), _without("entries/"))),
    "a size that is not the blob's": ("bundle", _manifest(blobs=lambda old: {digest: 1 for digest in old})),
    "public blob said to be withheld": (
        "blob-missing",
        _both(_manifest(blobs={}, withheld=lambda old: [*old, "a" * 64]), _without("blobs/")),
    ),
    "receipt left out": ("bundle", _without_number(10)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_both_verifiers_refuse_a_bundle_that_was_tampered_with(
    bundle: Path, filled: Site, tmp_path: Path, name: str
) -> None:
    code, change = MUTATIONS[name]
    mutated = _rewritten(bundle, tmp_path / "mutated.tar", change)
    assert (ours(mutated, filled.trust), theirs(mutated, filled.trust)) == (code, code)


def test_both_refuse_what_is_larger_than_a_bundle_may_be(
    bundle: Path, filled: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tamper.judges import tool

    for name in ("MOST_BYTES", "MOST_MEMBERS"):
        with monkeypatch.context() as patch:
            patch.setattr(bundle_module, name, 3)
            patch.setattr(tool, name, 3)
            assert (ours(bundle, filled.trust), theirs(bundle, filled.trust)) == ("bundle", "bundle")
    assert (bundle_module.MOST_BYTES, bundle_module.MOST_MEMBERS) == (tool.MOST_BYTES, tool.MOST_MEMBERS)
    assert bundle_module.MOST_BYTES_IN_MEMORY == tool.MOST_SMALL


def test_both_refuse_to_judge_with_a_clock_that_was_set_back(bundle: Path, filled: Site) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    assert ours(bundle, filled.trust, yesterday) == theirs(bundle, filled.trust, yesterday) == "clock-behind"


def test_random_byte_flips_of_a_bundle(bundle: Path, filled: Site, tmp_path: Path) -> None:
    """Both refuse every flip, or read exactly what was there: the rest are bytes of the archive that mean nothing."""
    original = bundle.read_bytes()
    whole = bundle_module.read_bundle(bundle)
    randomness = random.Random(20261130)
    flipped = tmp_path / "flipped.tar"
    found = 0
    for _ in range(FLIPS):
        place, bit = randomness.randrange(len(original)), 1 << randomness.randrange(8)
        flipped.write_bytes(original[:place] + bytes([original[place] ^ bit]) + original[place + 1 :])
        verdicts = ours(flipped, filled.trust), theirs(flipped, filled.trust)
        assert (verdicts[0] is None) == (verdicts[1] is None), f"byte {place}, bit {bit}: {verdicts}"
        if verdicts[0] is None:
            read = bundle_module.read_bundle(flipped)
            assert read._replace(path=bundle, keys=whole.keys) == whole
        else:
            found += 1
    assert found > FLIPS // 3
