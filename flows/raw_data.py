"""Hash and keep what a workload left: the worker's output files, and what its launcher wrote about it.

Nothing is followed: a worker that leaves a link leaves no evidence through it. Names of the worker's files are
percent-encoded, so that none of them can pose as one of the launcher's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec

from qualification.evidence.blobs import BlobStore
from qualification.evidence.sanitise import with_projection
from qualification.execution.generated import INDEX, keep_generated, kept_files
from qualification.records import Artifact

LAUNCHER = "launcher:"
MOST_FILES = 10_000
_CHUNK = 1 << 20
_LAUNCHER_FILES = {
    "events.jsonl": "application/jsonl",
    "outcome.json": "application/json",
    INDEX: "application/json",
    "*.log": "text/plain",
}
_MEDIA_TYPES = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".gz": "application/gzip",
    ".txt": "text/plain",
    ".py": "text/plain",
    ".cpp": "text/plain",
    ".ttir": "text/plain",
    ".ttgir": "text/plain",
    ".llir": "text/plain",
    ".ptx": "text/plain",
    ".toml": "application/toml",
    ".html": "text/html",
    ".png": "image/png",
}


class RawData(msgspec.Struct, frozen=True):
    """What was kept: the artifacts' records, and the blob of each of the worker's files by its relative path."""

    artifacts: tuple[Artifact, ...]
    files: dict[str, Path]
    problems: tuple[str, ...] = ()


def collect(launch_folder: Path, output: Path, blobs: BlobStore, process: str = "") -> RawData:
    """Store every file of ``output``, the launcher's files of ``launch_folder``, and of a failed run what its compilers
    generated, as blobs.

    Those of a named process of the workload are named under it. A file that holds what must not leave is private, and
    gets a public projection beside it. What is no plain file, and what exceeds ``MOST_FILES``, is named in
    ``problems``.
    """
    artifacts: list[Artifact] = []
    files: dict[str, Path] = {}
    problems: list[str] = []
    under = f"{process}/" if process else ""
    for path in _walk(output):
        name = quote(str(path.relative_to(output)))
        if not stat.S_ISREG(path.lstat().st_mode):
            problems.append(f"{name} is no plain file")
        elif len(artifacts) >= MOST_FILES:
            problems.append(f"more than {MOST_FILES} files; those from {name} on were not kept")
            break
        else:
            kept = _keep(path, f"{under}{name}", _media_type(path), blobs)
            artifacts += with_projection(blobs, kept)
            files[name] = blobs.path(kept.sha256)
    keep_generated(launch_folder)
    for path in kept_files(launch_folder):
        name = f"{LAUNCHER}{under}{quote(str(path.relative_to(launch_folder)))}"
        artifacts += with_projection(blobs, _keep(path, name, _media_type(path), blobs))
    for pattern, media_type in _LAUNCHER_FILES.items():
        for path in sorted(launch_folder.glob(pattern)):
            artifacts += with_projection(blobs, _keep(path, f"{LAUNCHER}{under}{path.name}", media_type, blobs))
    return RawData(tuple(artifacts), files, tuple(problems))


def _keep(path: Path, name: str, media_type: str, blobs: BlobStore) -> Artifact:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        digest = blobs.put_chunks(iter(lambda: file.read(_CHUNK), b""))
    size = blobs.check(digest)  # read back before anything is torn down
    return Artifact(name=name, sha256=digest, size=size, media_type=media_type)


def _media_type(path: Path) -> str:
    return _MEDIA_TYPES.get(path.suffix, "application/octet-stream")


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        yield from sorted(Path(root) / name for name in (*names, *links))
