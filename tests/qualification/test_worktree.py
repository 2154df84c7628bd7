"""A head is checked out outside every checkout, exactly, and is gone afterwards; hostile strings stay arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qualification.errors import ConfigurationError
from qualification.git import git
from qualification.subject import working_files
from qualification.worktree import create_worktree, fetch_head, retire_worktree
from tests.qualification.repositories import commit_files, make_repository


@pytest.fixture(autouse=True)
def _private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUALIFY_HOME", str(tmp_path / "home"))


def test_an_older_head_is_checked_out_exactly_and_retired(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    head = make_repository(repository, {"trainer_rank/rank.py": "old\n"})
    commit_files(repository, {"trainer_rank/rank.py": "new\n"})
    store, subject = fetch_head(str(repository), head)
    folder = tmp_path / "worktrees" / "one"
    create_worktree(store, subject, folder)
    assert (folder / "trainer_rank/rank.py").read_text() == "old\n"
    assert working_files(folder) == subject.files
    assert (subject.commit, subject.dirty) == (head, False)
    assert git(repository, "status", "--porcelain") == b""
    assert git(repository, "worktree", "list").count(b"\n") == 1
    assert retire_worktree(store, folder)
    assert git(store, "worktree", "list").count(b"\n") == 1


def test_a_head_is_fetched_again_after_the_branch_moved_away_from_it(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    make_repository(repository)
    head = commit_files(repository, {"trainer_rank/rank.py": "one\n"})
    git(repository, "reset", "--quiet", "--hard", "HEAD~1")
    _, subject = fetch_head(str(repository), head)
    assert subject.commit == head


def test_hooks_and_filters_of_the_repository_do_not_run(tmp_path: Path) -> None:
    repository, marker = tmp_path / "library", tmp_path / "executed"
    head = make_repository(repository, {".gitattributes": "* filter=evil\n"})
    git(repository, "config", "filter.evil.smudge", f"touch {marker}")
    hook = repository / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {marker}\n")
    hook.chmod(0o755)
    store, subject = fetch_head(str(repository), head)
    create_worktree(store, subject, tmp_path / "worktree")
    assert not marker.exists()


def test_attributes_of_a_head_change_no_byte_of_what_is_executed(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    rules = "trainer_rank/a.py ident\ntrainer_rank/b.py text eol=crlf\n"
    files = {f"trainer_rank/{name}.py": f"# $Id: {name} $\n" for name in "ab"}
    head = make_repository(repository, {".gitattributes": rules, **files})
    store, subject = fetch_head(str(repository), head)
    folder = tmp_path / "worktree"
    create_worktree(store, subject, folder)
    assert working_files(folder) == subject.files


def test_a_package_that_git_changes_on_the_way_out_is_refused(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    head = make_repository(repository, {"trainer_rank/a.py": "# $Id: a $\n"})
    store, subject = fetch_head(str(repository), head)
    (store / "info/attributes").write_text("* ident\n")
    with pytest.raises(ConfigurationError, match="other than it is committed"):
        create_worktree(store, subject, tmp_path / "worktree")


def test_a_dirty_repository_is_refused_with_a_head(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    head = make_repository(repository)
    (repository / "trainer_rank/__init__.py").write_text("changed\n")
    with pytest.raises(ConfigurationError, match="uncommitted changes"):
        fetch_head(str(repository), head)


def test_an_unknown_commit_is_refused_and_nothing_is_checked_out(tmp_path: Path) -> None:
    repository = tmp_path / "library"
    make_repository(repository)
    with pytest.raises(ConfigurationError, match="gives no commit"):
        fetch_head(str(repository), "0" * 39 + "1")


def test_submodules_are_not_followed(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    make_repository(inner)
    make_repository(outer)
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "vendored")
    head = commit_files(outer, {})
    store, subject = fetch_head(str(outer), head)
    create_worktree(store, subject, tmp_path / "worktree")
    assert list((tmp_path / "worktree/vendored").iterdir()) == []


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30))
def test_hostile_heads_and_addresses_are_refused_as_text(tmp_path: Path, text: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for address, head in ((str(tmp_path), text), (f"--upload-pack={text}", "0" * 40), (f"ext::{text}", "0" * 40)):
        with pytest.raises(ConfigurationError):
            fetch_head(address, head)
    assert sorted(tmp_path.rglob("*")) == before
