"""Files that are either whole or absent."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Replace ``path`` in one step; with ``sync`` it is on the disk when this returns. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    if sync:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
