"""Evidence from a real card: both verifiers read it, and one changed byte is found by both."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from flows.cli.main import execute

ROOT = Path(__file__).parent.parent.parent
BUNDLE = ROOT / "tests" / "data" / "native" / "h200-full-step.bundle"
KEY = "76365a11c0834bacf066b694aeac020dc09343682756a500fb493b40defaefe0"


def standalone(bundle: Path) -> int:
    command = [sys.executable, str(ROOT / "tools" / "verify_bundle.py"), str(bundle), "--accept", KEY]
    return subprocess.run(command, capture_output=True, check=False).returncode


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QUALIFY_TRUST", str(tmp_path / "trust"))


def test_both_verifiers_accept_the_bundle() -> None:
    assert execute(["bundle", "verify", str(BUNDLE), "--accept", KEY]) == 0
    assert standalone(BUNDLE) == 0


def test_nobody_accepts_it_without_its_key() -> None:
    assert execute(["bundle", "verify", str(BUNDLE)]) == 5


@pytest.mark.parametrize("member", ["entries/000000000001.json", "entries/000000000002.json", "head.json", "blobs/"])
def test_both_verifiers_find_one_changed_byte(member: str, tmp_path: Path) -> None:
    with tarfile.open(BUNDLE) as archive:
        inside = next(each for each in archive if each.name.startswith(member) and each.size)
    content = bytearray(BUNDLE.read_bytes())
    content[inside.offset_data + inside.size // 2] ^= 1
    changed = tmp_path / "changed.bundle"
    changed.write_bytes(content)
    assert execute(["bundle", "verify", str(changed), "--accept", KEY]) == 5
    assert standalone(changed) == 5
