"""Supervise real commands in tests."""

import secrets
import sys
from pathlib import Path

from qualification.execution.environment import child_environment
from qualification.execution.supervision import Command, Limits, Outcome, Specification
from qualification.execution.supervisor import supervise

DATA = Path(__file__).parents[2] / "data"


def run(folder: Path, *command: str, token: str | None = None, **limits: int) -> Outcome:
    """Supervise one command with a TERM wait of one second."""
    folder.mkdir(parents=True, exist_ok=True)
    return supervise(
        Specification(
            run="test",
            token=token or secrets.token_hex(8),
            folder=str(folder),
            command=Command(words=command, environment=child_environment(folder)),
            limits=Limits(**{"terminate_seconds": 1, **limits}),
            working_folder=str(folder),
        )
    )


def run_python(folder: Path, source: str, **limits: int) -> Outcome:
    """Supervise a few lines of Python."""
    return run(folder, sys.executable, "-c", source, **limits)
