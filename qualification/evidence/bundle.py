"""One file with everything recorded of a run, which a third party can verify offline.

A bundle is a tar archive of regular files: ``bundle.json`` (the manifest, canonical), ``head.json`` (a signed tree
head), ``entries/<sequence>.json`` (envelopes, as signed), ``blobs/sha256/<digest>`` and ``keys.json`` (the public keys
that signed, to be compared with what the reader knows them to be). Of entries between the run's it holds the digests
alone, from which the chain up to the head is computed. Private blobs stay at home and are listed as withheld.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Literal, NamedTuple

import msgspec

from qualification.errors import ConfigurationError
from qualification.evidence.canonical import canonical_bytes, parse_canonical
from qualification.evidence.chain import Entry
from qualification.evidence.files import flush_to_disk, sync_folder, written_aside
from qualification.evidence.findings import Code, InvalidEvidence
from qualification.evidence.trust import TrustedKey, key_id
from qualification.records import Count, Record, Sha256

FORMAT: Literal["qualify-bundle/1"] = "qualify-bundle/1"
MOST_MEMBERS = 20_000
MOST_BYTES = 4 << 30
MOST_BYTES_IN_MEMORY = 64 << 20
"""The largest manifest, head, key list or envelope; only blobs may be larger."""

_MEMBER = re.compile(r"(bundle|head|keys)\.json|entries/\d{12}\.json|blobs/sha256/[0-9a-f]{64}")


class Manifest(Record, frozen=True):
    """What a bundle holds. ``chain`` are the envelope digests of the entries numbered ``after + 1`` and up.

    ``root`` is the chain's hash at ``after``; ``entries`` are the numbers of the envelopes inside.
    """

    format: Literal["qualify-bundle/1"]
    ledger: str
    run: str
    after: Count
    root: Sha256
    chain: tuple[Sha256, ...]
    entries: tuple[Count, ...]
    blobs: dict[Sha256, Count]
    withheld: tuple[Sha256, ...]


class Bundle(NamedTuple):
    """A bundle whose members are safe and complete; nothing of it is verified yet but each blob's own digest."""

    path: Path
    manifest: Manifest
    head: bytes
    envelopes: dict[int, bytes]
    keys: tuple[TrustedKey, ...]


def entry_name(sequence: int) -> str:
    """Return the member name of an envelope."""
    return f"entries/{sequence:012d}.json"


def blob_name(digest: str) -> str:
    """Return the member name of a blob."""
    return f"blobs/sha256/{digest}"


def write_bundle(
    path: Path,
    manifest: Manifest,
    head: bytes,
    entries: Iterable[Entry],
    keys: Iterable[TrustedKey],
    blobs: Mapping[str, Path],
) -> None:
    """Write a bundle; the same evidence gives the same bytes. The file is complete or absent.

    Raises ConfigurationError when there is a file of this name already.
    """
    with written_aside(path.parent) as (file, temporary):
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            _add(archive, "bundle.json", canonical_bytes(manifest))
            _add(archive, "head.json", head)
            _add(archive, "keys.json", canonical_bytes(sorted(keys, key=lambda key: key.keyid)))
            for entry in entries:
                _add(archive, entry_name(entry.sequence), entry.envelope)
            for digest in sorted(manifest.blobs):
                with blobs[digest].open("rb") as content:
                    archive.addfile(_member(blob_name(digest), manifest.blobs[digest]), content)
        flush_to_disk(file)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            raise ConfigurationError(f"{path} exists; name a file that does not") from None
    sync_folder(path.parent)


def read_bundle(path: Path) -> Bundle:
    """Read a bundle and check its form: safe members only, each once, exactly those that the manifest lists.

    Raises InvalidEvidence (bundle, blob-unsafe, blob-altered); ConfigurationError when the file cannot be read.
    """
    small: dict[str, bytes] = {}
    blobs: dict[str, int] = {}
    with opened(path) as archive:
        for member, content in members(archive):
            if member.name.startswith("blobs/"):
                blobs[member.name.rpartition("/")[2]] = member.size
                _check_blob(member, content)
            elif member.size > MOST_BYTES_IN_MEMORY:
                raise InvalidEvidence(Code.BUNDLE, f"member {member.name} is larger than {MOST_BYTES_IN_MEMORY} bytes")
            else:
                small[member.name] = content.read()
    manifest = _manifest(small)
    expected = {"bundle.json", "head.json", "keys.json", *map(entry_name, manifest.entries)}
    if set(small) != expected or blobs != manifest.blobs:
        odd = sorted((set(small) ^ expected) | {blob_name(one) for one in blobs.keys() ^ manifest.blobs.keys()})
        raise InvalidEvidence(Code.BUNDLE, f"is not what its manifest lists: {', '.join(odd[:3]) or 'sizes differ'}")
    envelopes = {sequence: small[entry_name(sequence)] for sequence in manifest.entries}
    return Bundle(path, manifest, small["head.json"], envelopes, _keys(small["keys.json"]))


def opened(path: Path) -> tarfile.TarFile:
    """Open a bundle's archive."""
    try:
        return tarfile.open(path, mode="r:")
    except (OSError, tarfile.TarError) as error:
        if isinstance(error, OSError):
            raise ConfigurationError(f"{path}: {error.strerror or error}; give a bundle's file") from None
        raise InvalidEvidence(Code.BUNDLE, f"is no tar archive: {error}") from None


def members(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Yield each member and its content; refuse links, devices, odd names, repeats, and more than a bundle may hold."""
    seen: set[str] = set()
    total = 0
    try:
        for member in archive:
            total += member.size
            if not member.isreg() or not _MEMBER.fullmatch(member.name):
                raise InvalidEvidence(Code.BUNDLE, f"holds the member {member.name[:120]!r}, which no bundle may hold")
            if member.name in seen:
                raise InvalidEvidence(Code.BUNDLE, f"holds {member.name} twice")
            seen.add(member.name)
            if len(seen) > MOST_MEMBERS or total > MOST_BYTES:
                raise InvalidEvidence(Code.BUNDLE, f"holds more than {MOST_MEMBERS} members or {MOST_BYTES} bytes")
            content = archive.extractfile(member)
            assert content is not None
            yield member, content
    except tarfile.TarError as error:
        raise InvalidEvidence(Code.BUNDLE, f"is a damaged tar archive: {error}") from None


def _manifest(small: Mapping[str, bytes]) -> Manifest:
    for name in ("bundle.json", "head.json", "keys.json"):
        if name not in small:
            raise InvalidEvidence(Code.BUNDLE, f"has no {name}")
    try:
        parse_canonical(small["bundle.json"])
        manifest = msgspec.json.decode(small["bundle.json"], type=Manifest)
    except msgspec.DecodeError as error:
        raise InvalidEvidence(Code.BUNDLE, f"has a manifest of another form: {error}") from None
    last = manifest.after + len(manifest.chain)
    if list(manifest.entries) != sorted(set(manifest.entries)) or not manifest.entries:
        raise InvalidEvidence(Code.BUNDLE, "lists entries out of order, twice, or none")
    if manifest.entries[0] != manifest.after + 1 or manifest.entries[-1] > last:
        raise InvalidEvidence(Code.BUNDLE, "lists entries outside its chain")
    return manifest


def _keys(stored: bytes) -> tuple[TrustedKey, ...]:
    try:
        keys = msgspec.json.decode(stored, type=tuple[TrustedKey, ...])
        wrong = [key.keyid for key in keys if key_id(key.public) != key.keyid]
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidEvidence(Code.KEY_ALTERED, f"has a list of keys that cannot be read: {error}") from None
    if wrong:
        raise InvalidEvidence(Code.KEY_ALTERED, f"lists a public key under the id {wrong[0]} of another one")
    return keys


def _check_blob(member: tarfile.TarInfo, content: IO[bytes]) -> None:
    digest = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
    if blob_name(digest) != member.name:
        raise InvalidEvidence(Code.BLOB_ALTERED, f"holds {member.name}, whose bytes have the digest {digest}")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    archive.addfile(_member(name, len(content)), io.BytesIO(content))


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member
