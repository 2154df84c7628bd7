"""Subjects are read by git plumbing: exact, honest about changes, and never imported."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qualification.errors import ConfigurationError
from qualification.git import git, read_reference, require_commit, require_reference, require_repository
from qualification.subject import installed_checkout, manifest, subject_of_checkout, subject_of_commit
from tests.qualification.repositories import commit_files, make_repository


def test_a_clean_checkout_and_its_commit_are_the_same_subject(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    commit = make_repository(repository, {"trainer_rank/rank.py": "value = 1\n", "other.py": "not part of it\n"})
    subject = subject_of_checkout(repository)
    assert subject.commit == commit
    assert not subject.dirty
    assert subject.files["trainer_rank/rank.py"] == hashlib.sha256(b"value = 1\n").hexdigest()
    assert set(subject.files) == {"trainer_rank/__init__.py", "trainer_rank/rank.py"}
    assert subject.authors == ("ada@example.org",)
    assert subject_of_commit(repository, commit, address=str(repository)) == subject


def test_the_manifest_is_what_sha256sum_checks(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    make_repository(repository, {"trainer_rank/rank.py": "value = 1\n"})
    subject = subject_of_checkout(repository)
    listing = manifest(subject.files)
    assert hashlib.sha256(listing).hexdigest() == subject.manifest_sha256
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet"], input=listing, cwd=repository, check=True)


@pytest.mark.parametrize("change", ["trainer_rank/__init__.py", "trainer_rank/added.py", "elsewhere.txt"])
def test_any_change_makes_a_checkout_dirty(tmp_path: Path, change: str) -> None:
    repository = tmp_path / "library"
    commit = make_repository(repository)
    (repository / change).write_text("changed\n")
    subject = subject_of_checkout(repository)
    assert subject.dirty
    assert subject.commit == commit
    if change.startswith("trainer_rank/"):
        assert subject.files[change] == hashlib.sha256(b"changed\n").hexdigest()


def test_reading_a_subject_executes_nothing_of_it(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    marker = tmp_path / "executed"
    make_repository(repository, {"trainer_rank/__init__.py": f"open({str(marker)!r}, 'w')\n"})
    hook = repository / ".git/hooks/fsmonitor"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {marker}\n")
    hook.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(hook))
    subject_of_checkout(repository)
    assert not marker.exists()


def test_locating_the_installed_checkout_imports_neither_it_nor_torch() -> None:
    program = (
        "import sys; from qualification.subject import installed_checkout, subject_of_checkout; "
        "subject_of_checkout(installed_checkout()); print(*sorted(set(sys.modules) & {'torch', 'trainer_rank'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert (installed_checkout() / "trainer_rank/__init__.py").is_file()


def test_a_link_in_the_package_is_refused(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    make_repository(repository)
    (repository / "trainer_rank/secrets.py").symlink_to("/etc/passwd")
    commit = commit_files(repository, {})
    for read in (lambda: subject_of_checkout(repository), lambda: subject_of_commit(repository, commit, address="x")):
        with pytest.raises(ConfigurationError, match=r"trainer_rank/secrets\.py .*link"):
            read()


def test_a_commit_without_the_package_is_refused(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    make_repository(repository)
    git(repository, "rm", "--quiet", "-r", "trainer_rank")
    commit = commit_files(repository, {"README": "empty"})
    with pytest.raises(ConfigurationError, match="holds no package trainer_rank"):
        subject_of_commit(repository, commit, address=str(repository))


@given(st.text(max_size=60))
@example("HEAD")
@example("main")
@example("a" * 39)
@example("A" * 40)
@example("a" * 39 + "g")
@example("a" * 40 + "\n")
@example("--upload-pack=touch x")
def test_only_a_full_lower_case_commit_id_names_a_head(text: str) -> None:
    with pytest.raises(ConfigurationError, match="40 hexadecimal digits"):
        require_commit(text)


@pytest.mark.parametrize(
    "address",
    [
        "--upload-pack=touch x",
        "ext::sh -c touch% x",
        "file:///etc",
        "http://example.org/x.git",
        "http://user:secret@example.org/x.git",
        "https://user:secret@example.org/x.git",
        "https://token@example.org/x.git",
        "ssh://-oProxyCommand=x/y",
        "-oProxyCommand=x@host:y",
        "git@host::x",
        "",
        "no-such-folder",
    ],
)
def test_an_address_that_is_no_repository_is_refused_without_repeating_a_secret(address: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        require_repository(address)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("address", ["https://example.org/x.git", "ssh://git@example.org/x", "git@example.org:a/b.git"])
def test_usual_addresses_are_accepted(address: str) -> None:
    assert require_repository(address) == address


@pytest.mark.parametrize(
    "reference",
    ["main", "refs/heads/../x", "refs/heads/x.lock", "--upload-pack=x", "refs/heads/", "refs/heads/a b", ""],
)
def test_only_full_names_are_references(reference: str) -> None:
    with pytest.raises(ConfigurationError, match="not a full name"):
        require_reference(reference)


def test_a_reference_is_read_as_it_is_now(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    first = make_repository(repository)
    git(repository, "update-ref", "refs/pull/7/head", first)
    second = commit_files(repository, {"trainer_rank/rank.py": "value = 2\n"})
    assert read_reference(str(repository), "refs/pull/7/head") == first
    assert read_reference(str(repository), "refs/heads/main") == second
    with pytest.raises(ConfigurationError):
        read_reference(str(repository), "refs/heads/absent")
