"""Evidence from a real card: both verifiers read it, and one changed byte is found by both."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from flows.cli.main import execute

ROOT = Path(__file__).parent.parent.parent
BUNDLES = ROOT / "tests" / "data" / "native"
BUNDLE = BUNDLES / "h200-full-step.bundle"
KEY = "76365a11c0834bacf066b694aeac020dc09343682756a500fb493b40defaefe0"
PASSED, PASSED_KEY = BUNDLES / "h200-passed.bundle", "e13ea419d639519830e06fe11fe7c813c4f1b7bfc48c4eeafc0cd1c11ccff917"


def standalone(bundle: Path, key: str = KEY) -> int:
    command = [sys.executable, str(ROOT / "tools" / "verify_bundle.py"), str(bundle), "--accept", key]
    return subprocess.run(command, capture_output=True, check=False).returncode


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QUALIFY_TRUST", str(tmp_path / "trust"))


@pytest.mark.parametrize(("bundle", "key"), [(BUNDLE, KEY), (PASSED, PASSED_KEY)])
def test_both_verifiers_accept_the_bundle(bundle: Path, key: str) -> None:
    assert execute(["bundle", "verify", str(bundle), "--accept", key]) == 0
    assert standalone(bundle, key) == 0


def test_the_failed_run_is_rejected_wherever_it_is_taken_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bundle", "import", str(BUNDLE), "--accept", KEY]) == 0
    assert execute(["gate", "check"]) == 3
    assert "rejected" in capsys.readouterr().out


def test_the_passed_run_lacks_one_approval_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """As it was when the run ended: whether it is still fresh depends on the day of this test."""
    assert execute(["bundle", "import", str(PASSED), "--accept", PASSED_KEY]) == 0
    capsys.readouterr()
    assert execute(["gate", "explain", "--decision", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["decision"], document["row"]) == ("held", "unapproved")
    assert document["reasons"] == ["0 of 1 approvals"] and document["differences"] == []
    assert [line["row"] for line in document["table"] if line["applies"]] == ["unapproved"]


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
