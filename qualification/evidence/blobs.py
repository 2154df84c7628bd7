"""Content-addressed blobs in an OCI image layout under ``$QUALIFY_HOME``: ``blobs/sha256/<64 hex digits>``.

A blob is written once, aside, fsynced, and then gets its name in one step: it is complete or absent, also after a full
disk, a kill or a power cut. Nothing is ever followed, truncated or overwritten.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from qualification.errors import QualificationError
from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.files import (
    INCOMING,
    clear_leftovers,
    flush_to_disk,
    sync_folder,
    write_once,
    written_aside,
)
from qualification.evidence.findings import Code, InvalidEvidence

MAXIMUM_BLOB_BYTES = 1 << 30
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20
_LAYOUT = {
    "oci-layout": {"imageLayoutVersion": "1.0.0"},
    "index.json": {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []},
}


class BlobError(QualificationError):
    """A blob cannot be stored: it is too large, or the disk is full. Nothing of it is left behind."""


class BlobStore:
    """The blobs under ``root`` (the home folder). Reading checks digests; writing the same bytes twice is one blob."""

    def __init__(self, root: Path, maximum: int = MAXIMUM_BLOB_BYTES) -> None:
        self.root = root
        self.maximum = maximum
        self.folder = root / "blobs" / "sha256"
        self._created = False

    def create(self) -> None:
        """Make folders and marker files where they are missing; clear what killed writers left long ago."""
        if self._created:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in _LAYOUT.items():
            if not (self.root / name).exists():
                try:
                    write_once(self.root / name, canonical_bytes(content))
                except FileExistsError:
                    continue
        clear_leftovers(self.folder)
        self._created = True

    def path(self, digest: str) -> Path:
        """Return where the blob of this digest lies, whether or not it is there."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is no SHA-256 digest")
        return self.folder / digest

    def put(self, content: bytes) -> str:
        """Store bytes and return their digest. Raises BlobError."""
        return self.put_chunks([content])

    def put_chunks(self, chunks: Iterable[bytes]) -> str:
        """Store a stream of bytes and return its digest; the bytes are on the disk by then. Raises BlobError."""
        self.create()
        digest = hashlib.sha256()
        size = 0
        try:
            with written_aside(self.folder, 0o600) as (file, temporary):
                for chunk in chunks:
                    size += len(chunk)
                    if size > self.maximum:
                        raise BlobError(f"a blob is larger than {self.maximum} bytes; record less, or raise the limit")
                    digest.update(chunk)
                    file.write(chunk)
                flush_to_disk(file)
                self._name(temporary, digest.hexdigest())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise BlobError(f"no room for a blob in {self.folder}; free some space and run again") from None
        return digest.hexdigest()

    def sync(self) -> None:
        """Make the names of all blobs written so far survive a power cut; an entry that rests on them does this."""
        sync_folder(self.folder)

    def read(self, digest: str) -> bytes:
        """Return a blob's bytes. Raises InvalidEvidence when it is missing, unsafe or altered."""
        content = b"".join(self._chunks(digest))
        if hashlib.sha256(content).hexdigest() != digest:
            raise InvalidEvidence(Code.BLOB_ALTERED, "does not have the digest that is its name")
        return content

    def check(self, digest: str, size: int | None = None) -> int:
        """Return a blob's size after checking its bytes against its digest and, where given, its size."""
        actual, length = hashlib.sha256(), 0
        for chunk in self._chunks(digest):
            actual.update(chunk)
            length += len(chunk)
        if actual.hexdigest() != digest:
            raise InvalidEvidence(Code.BLOB_ALTERED, "does not have the digest that is its name")
        if size is not None and size != length:
            raise InvalidEvidence(Code.BLOB_ALTERED, f"has {length} bytes, recorded are {size}")
        return length

    def has(self, digest: str) -> bool:
        """Whether a regular file of this name is there; its content is not read."""
        try:
            return stat.S_ISREG(self.path(digest).lstat().st_mode)
        except FileNotFoundError:
            return False

    def remove(self, digest: str) -> None:
        """Remove a blob for good; record a tombstone first."""
        self.path(digest).unlink(missing_ok=True)
        self.sync()

    def names(self) -> Iterator[str]:
        """Yield the name of everything in the folder but files that are being written, in order."""
        try:
            with os.scandir(self.folder) as entries:
                yield from sorted(entry.name for entry in entries if not entry.name.startswith(INCOMING))
        except FileNotFoundError:
            return

    def _name(self, temporary: Path, digest: str) -> None:
        try:
            os.link(temporary, self.path(digest))
        except FileExistsError:
            self.check(digest)

    def _chunks(self, digest: str) -> Iterator[bytes]:
        try:
            descriptor = os.open(self.path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise InvalidEvidence(Code.BLOB_MISSING, "is not there") from None
        except OSError as error:
            raise InvalidEvidence(Code.BLOB_UNSAFE, f"cannot be read as a file ({error.strerror})") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidEvidence(Code.BLOB_UNSAFE, "is no regular file")
            while chunk := os.read(descriptor, _CHUNK):
                yield chunk
        finally:
            os.close(descriptor)


def is_digest(name: str) -> bool:
    """Whether ``name`` is a SHA-256 in 64 lower-case hex digits."""
    return _DIGEST.fullmatch(name) is not None
