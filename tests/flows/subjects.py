"""Repositories with a small ``trainer_rank`` of their own, whose contract does what a test asks of it."""

from __future__ import annotations

from pathlib import Path

from tests.qualification.repositories import commit_files, make_repository

_CONTRACT = """
import os, signal, subprocess, sys, time
from pathlib import Path

CONTRACT_VERSION = 1
VOCABULARY = 16


def construct(**given):
{body}
"""


class Trainer:
    """A repository that is given one behaviour per commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_repository(folder, {"trainer_rank/policies/forecast.toml": "# a policy\n"})

    def head(self, body: str, **others: str) -> str:
        """Commit a contract whose ``construct`` executes ``body``, and other files by path; return the commit."""
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        return commit_files(self.folder, {"trainer_rank/contract.py": _CONTRACT.format(body=indented), **others})
