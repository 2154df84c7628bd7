"""Is a commit still the head of the reference that it was taken from? Asked just before a decision, not remembered."""

from __future__ import annotations

from pathlib import Path

from qualification.errors import ConfigurationError
from qualification.gate import Head
from qualification.git import git, require_repository

_SECONDS = 20.0


def head_standing(commit: str, reference: str | None, address: str | None) -> Head:
    """Read the reference at ``address`` and compare. Without a reference the commit is fixed.

    An address that is missing or cannot be read, and a reference that is gone, never count as unchanged.
    """
    if reference is None:
        return Head.FIXED
    if address is None:
        return Head.UNREADABLE
    try:
        listed = git(
            Path("/"), "ls-remote", "--exit-code", "--", require_repository(address), reference, timeout=_SECONDS
        ).decode()
    except (ConfigurationError, UnicodeDecodeError):
        return Head.UNREADABLE
    named = {line.partition("\t")[2]: line.partition("\t")[0] for line in listed.splitlines()}
    found = named.get(reference)
    if found is None:
        return Head.UNREADABLE
    return Head.CURRENT if found == commit else Head.MOVED
