"""A fresh working tree of exactly one commit, outside every checkout, and its retirement.

The commit is fetched into a bare repository of our own, so that no hook, filter or setting of the subject's repository
takes part, and no attribute of its own changes a byte on the way to the working tree. Submodules are never followed.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from qualification.errors import ConfigurationError
from qualification.git import git, require_commit, require_repository
from qualification.home import home
from qualification.records import Subject
from qualification.subject import PACKAGE, is_dirty, subject_of_commit, working_files

_UNCHANGED = "* -text !eol !ident !filter !working-tree-encoding\n"
"""What git does to files that it checks out: nothing. In ``info/attributes``, which no .gitattributes overrules."""


def fetch_head(address: str, head: str, reference: str | None = None) -> tuple[Path, Subject]:
    """Fetch one commit of a repository into a store of our own; return the store and the commit's subject.

    ``reference`` is where the commit was taken from, if it was. A local repository with uncommitted changes is
    refused: what is there is not what ``head`` names.
    """
    require_commit(head)
    source = require_repository(address)
    local = Path(source)
    if local.is_dir() and (local / ".git").exists() and is_dirty(local):
        raise ConfigurationError(
            f"{local} has uncommitted changes, so it is not {head}: commit or stash them, or leave --head out"
        )
    store = _store(source)
    if not _holds(store, head):
        try:
            git(
                store, "fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head", source, head
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"{address} gives no commit {head}: {error}") from None
    return store, subject_of_commit(store, head, address=source, reference=reference)


def create_worktree(store: Path, subject: Subject, folder: Path) -> None:
    """Check the commit out into ``folder``, which must not exist yet, and read back that its package is unchanged."""
    head = subject.commit
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    git(store, "worktree", "add", "--detach", "--quiet", str(folder), require_commit(head))
    if working_files(folder) != subject.files:
        raise ConfigurationError(f"{PACKAGE} of {head} came out of git in {folder} other than it is committed")


def retire_worktree(store: Path, folder: Path) -> bool:
    """Remove a worktree and git's memory of it; whether it is really gone."""
    shutil.rmtree(folder, ignore_errors=True)
    git(store, "worktree", "prune", "--expire", "now")
    return not folder.exists()


def _store(source: str) -> Path:
    store = home() / "repositories" / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.git"
    if not (store / "HEAD").exists():
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        git(store, "init", "--quiet", "--bare", "--template=")
    attributes = store / "info" / "attributes"
    if not attributes.exists():
        attributes.parent.mkdir(exist_ok=True)
        attributes.write_text(_UNCHANGED)
    return store


def _holds(store: Path, head: str) -> bool:
    try:
        git(store, "cat-file", "-e", f"{head}^{{commit}}")
    except ConfigurationError:
        return False
    return True
