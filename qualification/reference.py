"""Is a commit still the head of the reference that it was taken from? Asked just before a decision, not remembered."""

from __future__ import annotations

from qualification.errors import ConfigurationError
from qualification.gate import Head
from qualification.git import read_reference


def head_standing(commit: str, reference: str | None, address: str | None) -> Head:
    """Read the reference at ``address`` and compare. Without a reference the commit is fixed.

    An address that is missing or cannot be read, and a reference that is gone, never count as unchanged.
    """
    if reference is None:
        return Head.FIXED
    if address is None:
        return Head.UNREADABLE
    try:
        found = read_reference(address, reference)
    except ConfigurationError:
        return Head.UNREADABLE
    return Head.CURRENT if found == commit else Head.MOVED
