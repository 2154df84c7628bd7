"""Keep the code that compilers generated in a run that failed, before its private caches are retired.

A run failed when its command did, or when one of its planner reports tells of a failure. Of the files that explain one
the report names those on the failing stack; they are kept first, then the latest. An index lists every source with its
SHA-256, kept or not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from qualification.execution.environment import cache_folder
from qualification.execution.files import write_durably
from qualification.execution.supervisor import read_outcome

FOLDER, INDEX = "generated", "generated.json"
MOST_FILES = 256
MOST_BYTES = 16 << 20
MOST_LISTED = 10_000
LARGEST_REPORT = 1 << 20
_SOURCES = frozenset(
    (".py", ".c", ".cpp", ".cu", ".h", ".hpp", ".ttir", ".ttgir", ".llir", ".ptx", ".mlir", ".json", ".txt", ".yaml")
)


class GeneratedFile(msgspec.Struct, frozen=True):
    """One source in a compile cache; ``on_stack``: a report of the run names it with this content."""

    name: str
    size: int
    sha256: str
    on_stack: bool
    kept: bool


def keep_generated(folder: Path) -> None:
    """Copy what explains a failure from the caches of a failed command in ``folder`` into ``generated`` beside them.

    Does nothing when the caches are retired already, or nothing failed. Links are never followed. Raises OSError.
    """
    root = cache_folder(folder)
    if root.is_symlink() or not root.is_dir():
        return
    named, outcome = _named(folder), read_outcome(folder)
    _remove(folder / FOLDER)
    (folder / INDEX).unlink(missing_ok=True)
    if outcome is not None and outcome.succeeded and named is None:
        return
    listed: list[GeneratedFile] = []
    count = taken = 0
    found = [source for path in _sources(root) if (source := _hashed(path))]
    found.sort(key=lambda each: (each.sha256 not in (named or ()), -each.written, each.path))
    for path, size, digest, _ in found:
        name = path.relative_to(root)
        fits = count < MOST_FILES and taken + size <= MOST_BYTES
        if fits:
            count, taken, place = count + 1, taken + size, folder / FOLDER / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place, follow_symlinks=False)
        listed.append(GeneratedFile(str(name), size, digest, digest in (named or ()), fits))
    if listed:
        write_durably(folder / INDEX, msgspec.json.format(msgspec.json.encode({"files": listed}), indent=1))


def kept_files(folder: Path) -> list[Path]:
    """Return what was kept in a command's folder; nothing where a link stands in its place."""
    kept = folder / FOLDER
    return [] if kept.is_symlink() else sorted(path for path in kept.rglob("*") if stat.S_ISREG(path.lstat().st_mode))


def _remove(path: Path) -> None:
    """Remove what a command may have put where its generated code is to be kept."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _named(folder: Path) -> frozenset[str] | None:
    """Return the hashes of the files that failure reports name; None when no report tells of a failure."""
    hashes: set[str] = set()
    failed = False
    for path in sorted(folder.glob("**/*.report.json")):
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_REPORT:
                continue
            failure = msgspec.json.decode(path.read_bytes(), type=_Report).failure
        except (OSError, msgspec.MsgspecError):  # no report that can be read; the judge says so
            continue
        if failure is not None:
            failed = True
            hashes.update(each.sha256 for each in failure.generated)
    return frozenset(hashes) if failed else None


class _File(msgspec.Struct):
    sha256: str


class _Failure(msgspec.Struct):
    generated: list[_File] = []


class _Report(msgspec.Struct):
    failure: _Failure | None = None


class _Source(NamedTuple):
    path: Path
    size: int
    sha256: str
    written: int


def _sources(root: Path) -> Iterator[Path]:
    paths = (
        Path(folder) / name
        for folder, _, names in os.walk(root, followlinks=False)
        for name in sorted(names)
        if Path(name).suffix in _SOURCES
    )
    yield from islice(paths, MOST_LISTED)


def _hashed(path: Path) -> _Source | None:
    """Hash a plain file; None for anything else, and for what cannot be read."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return None
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
    return _Source(path, status.st_size, digest, status.st_mtime_ns)
