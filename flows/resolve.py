"""From a request to the exact source: subject, policy document, and where its ``trainer_rank`` lies or will lie."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from flows.request import Request
from qualification.errors import ConfigurationError
from qualification.git import git, read_reference
from qualification.locks import Lock, find_lock
from qualification.records import Policy, Subject
from qualification.subject import PACKAGE, installed_checkout, subject_of_checkout
from qualification.worktree import fetch_head

POLICIES = f"{PACKAGE}/policies"


@dataclass(frozen=True)
class Resolved:
    """A subject with its policy. ``checkout`` holds it as it is; else it must be checked out of ``store`` first.

    ``lock`` names the packages that a checked-out subject wants; None when it has no lock.
    """

    subject: Subject
    policy: Policy
    policy_document: bytes
    checkout: Path | None
    store: Path | None
    lock: Lock | None = None


def resolve(request: Request) -> Resolved:
    """Name the exact source of a request. Raises ConfigurationError for a source or a policy that is not there."""
    address = request.repository or str(installed_checkout())
    head = request.head or (read_reference(address, request.reference) if request.reference else None)
    if head is None:
        root = installed_checkout()
        subject = subject_of_checkout(root)
        name = policy_file(subject, request.policy)
        document = (root / name).read_bytes()
        return Resolved(subject, _policy(subject, request.policy, name, document), document, root, None)
    store, subject = fetch_head(address, head, request.reference)
    name = policy_file(subject, request.policy)
    document = git(store, "cat-file", "blob", f"{head}:{name}")
    return Resolved(
        subject, _policy(subject, request.policy, name, document), document, None, store, _lock(store, head)
    )


def policy_file(subject: Subject, policy: str) -> str:
    """Return the path of a policy's document in the subject; a policy that the subject does not ship is refused."""
    prefix, suffix = f"{POLICIES}/", ".toml"
    shipped = {
        name.removeprefix(prefix).removesuffix(suffix): name
        for name in subject.files
        if name.startswith(prefix) and name.endswith(suffix)
    }
    if policy not in shipped:
        known = ", ".join(sorted(shipped)) or "none"
        raise ConfigurationError(f"policy {policy!r} is not in the subject {subject.commit[:12]}; it has: {known}")
    return shipped[policy]


def _policy(subject: Subject, policy: str, name: str, document: bytes) -> Policy:
    digest = hashlib.sha256(document).hexdigest()
    if digest != subject.files[name]:
        raise ConfigurationError(f"{name} changed while it was read; run again")
    return Policy(name=policy, sha256=digest)


def _lock(store: Path, head: str) -> Lock | None:
    names = git(store, "ls-tree", "--full-tree", "--name-only", "-z", head).decode(errors="replace").split("\0")
    return find_lock(names, lambda name: git(store, "cat-file", "blob", f"{head}:{name}"))
