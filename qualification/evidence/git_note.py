"""A tree head sink: the signed head as a git note, which a push brings to everyone who has the repository.

``git notes --ref=qualify/<ledger id> show`` prints every head that was added to the commit at hand, one a line.
"""

from __future__ import annotations

from pathlib import Path

from qualification.git import git
from qualification.records import TreeHead

_IDENTITY = ("-c", "user.name=qualify", "-c", "user.email=qualify@localhost")


def publish(head: TreeHead, envelope: bytes, argument: str) -> None:
    """Append the head to the note of the repository's present commit; ``argument`` is the repository's folder."""
    folder = Path(argument)
    reference = f"--ref=qualify/{head.ledger}"
    git(folder, *_IDENTITY, "notes", reference, "append", "--file=-", "HEAD", standard_input=envelope)
