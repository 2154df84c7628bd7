"""Is a commit still the head of its reference? Against real repositories."""

from pathlib import Path

import pytest

from qualification.gate import Head
from qualification.git import git
from qualification.reference import head_standing

REFERENCE = "refs/pull/7/head"


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A repository with two commits; the reference names the second."""
    folder = tmp_path / "remote"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for message in ("first", "second"):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        git(folder, *who, "commit", "--quiet", "--allow-empty", "-m", message)
    git(folder, "update-ref", REFERENCE, "HEAD")
    return folder


def commit(remote: Path, name: str) -> str:
    return git(remote, "rev-parse", name).decode().strip()


def test_a_reference_is_current_or_moved(remote: Path) -> None:
    address = str(remote)
    assert head_standing(commit(remote, "HEAD"), REFERENCE, address) is Head.CURRENT
    assert head_standing(commit(remote, "HEAD~1"), REFERENCE, address) is Head.MOVED
    git(remote, "update-ref", REFERENCE, "HEAD~1")
    assert head_standing(commit(remote, "HEAD~1"), REFERENCE, address) is Head.CURRENT


def test_a_commit_named_by_itself_is_fixed(remote: Path) -> None:
    assert head_standing(commit(remote, "HEAD"), None, None) is Head.FIXED
    assert head_standing(commit(remote, "HEAD"), None, str(remote)) is Head.FIXED


@pytest.mark.parametrize(
    "address", [None, "", "/nowhere", "--upload-pack=touch", "ext::sh -c id", "https://127.0.0.1:1/x"]
)
def test_what_cannot_be_read_never_counts_as_unchanged(remote: Path, address: str | None) -> None:
    assert head_standing(commit(remote, "HEAD"), REFERENCE, address) is Head.UNREADABLE


def test_a_reference_that_is_gone_or_only_looks_alike_is_unreadable(remote: Path) -> None:
    git(remote, "update-ref", f"refs/heads/{REFERENCE}", "HEAD")
    git(remote, "update-ref", "-d", REFERENCE)
    assert head_standing(commit(remote, "HEAD"), REFERENCE, str(remote)) is Head.UNREADABLE
