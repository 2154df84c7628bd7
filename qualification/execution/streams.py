"""How ranks that torchrun starts reach the supervisor: named pipes, one each for output, errors and events of a rank.

torchrun hands no open file on to its ranks. So each of them starts as this module, ``streams FOLDER COMMAND...``,
which puts its rank's pipes in place of the inherited files and becomes the command.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = "streams"
NAMES = ("stdout", "stderr", "events")
EVENTS_VARIABLE = "QUALIFY_EVENTS_FD"
_MODE = 0o622  # a container's user writes, nobody but the supervisor reads


def open_streams(folder: Path, ranks: int) -> list[list[int]]:
    """Make the pipes of every rank below ``folder`` and return their readers, in the order of ``NAMES``.

    Each reader holds its pipe open for writing too, so that no rank waits to open it and none ends it for another.
    """
    (folder / FOLDER).mkdir(exist_ok=True)
    return [[_make(path) for path in _paths(folder / FOLDER, rank)] for rank in range(ranks)]


def become(folder: Path, rank: int, command: list[str]) -> None:
    """Turn this process into ``command`` of one rank, writing into that rank's pipes. Raises OSError."""
    output, error, events = (os.open(path, os.O_WRONLY) for path in _paths(folder, rank))
    os.dup2(output, 1)
    os.dup2(error, 2)
    os.set_inheritable(events, True)
    os.environ[EVENTS_VARIABLE] = str(events)
    os.execvp(command[0], command)  # noqa: S606 - no shell


def _paths(folder: Path, rank: int) -> list[Path]:
    return [folder / f"rank-{rank}.{name}" for name in NAMES]


def _make(path: Path) -> int:
    os.mkfifo(path)
    path.chmod(_MODE)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


if __name__ == "__main__":
    become(Path(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2:])
