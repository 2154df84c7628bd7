"""Files that are complete or absent: written aside, fsynced, then given their name in one step."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

INCOMING = ".incoming-"
ABANDONED_SECONDS = 86_400


@contextlib.contextmanager
def written_aside(folder: Path, mode: int = 0o644) -> Iterator[tuple[BinaryIO, Path]]:
    """Open a new file in ``folder`` under a temporary name; it is removed on the way out, whatever happened.

    Give the file its name (``os.link`` or ``os.rename``) inside the block.
    """
    path = folder / f"{INCOMING}{os.getpid()}-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file, path
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def write_once(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file that must not exist yet, durably. Raises FileExistsError, and OSError for a full disk."""
    with written_aside(path.parent, mode) as (file, temporary):
        file.write(content)
        flush_to_disk(file)
        os.link(temporary, path)
    sync_folder(path.parent)


def clear_leftovers(folder: Path) -> None:
    """Remove temporary files that no living writer can still be writing."""
    long_ago = time.time() - ABANDONED_SECONDS
    for path in folder.glob(f"{INCOMING}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_mtime < long_ago:
                path.unlink()


def flush_to_disk(file: BinaryIO) -> None:
    """Make what was written to ``file`` survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
