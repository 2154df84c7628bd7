"""Whose signatures count: the public keys and permitted people of ``$QUALIFY_TRUST``.

``keys/<key id>.json`` is one public key of the pipeline, as securesystemslib writes it, with its time of validity.
``people.toml``, a file that people review, names who may sign as a person::

    [people.alice]
    roles = ["approver"]
    keys = ["ssh-ed25519 AAAA... alice@laptop"]  # or the 64 hex digits of the raw Ed25519 key
    identities = ["alice@example.org", "alice"]  # as git and the machine name this person
    expires_at = "2027-06-30T00:00:00Z"          # optional
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Self

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from securesystemslib.signer import SSlibKey

from qualification.errors import ConfigurationError
from qualification.evidence.canonical import canonical_bytes
from qualification.evidence.files import write_once
from qualification.evidence.findings import Code, InvalidEvidence
from qualification.records import Record, Sha256, Stamp

PEOPLE_FILE = "people.toml"
KEYS_FOLDER = "keys"
PIPELINE = "pipeline"


class KeyUse(StrEnum):
    """What a key may sign: the pipeline's facts, or a person's word."""

    PIPELINE = "pipeline"
    PERSON = "person"


class TrustedKey(Record, frozen=True):
    """An Ed25519 public key (64 hex digits), whose it is, and when it may sign (None: no bound)."""

    keyid: Sha256
    public: Sha256
    owner: str
    use: KeyUse
    valid_from: Stamp | None = None
    expires_at: Stamp | None = None

    def key(self) -> SSlibKey:
        """Return the key in the form that securesystemslib verifies with."""
        return SSlibKey(self.keyid, "ed25519", "ed25519", {"public": self.public})

    def valid_at(self, stamp: str) -> bool:
        """Whether the key may sign a statement made at ``stamp`` (UTC)."""
        second = stamp[:19]
        return (self.valid_from or "")[:19] <= second and (self.expires_at is None or second < self.expires_at[:19])


class Person(Record, frozen=True):
    """Someone whose word counts: roles, keys in any encoding, until when, and other names of theirs.

    ``identities`` are the e-mail addresses and logins by which git and the machine know this person.
    """

    roles: tuple[str, ...]
    keys: tuple[str, ...]
    expires_at: Stamp | None = None
    identities: tuple[str, ...] = ()


class _PeopleFile(Record, frozen=True):
    people: dict[str, Person] = msgspec.field(default_factory=dict)


class _KeyValue(Record, frozen=True):
    public: Sha256


class PublicKeyFile(Record, frozen=True):
    """The form of ``keys/<key id>.json``; the id is the digest of type, scheme and value."""

    keytype: str
    scheme: str
    keyval: _KeyValue
    owner: str
    valid_from: Stamp | None = None
    expires_at: Stamp | None = None


class Trust:
    """The keys that count, one per distinct public key whatever its encodings."""

    def __init__(self, keys: Iterable[TrustedKey]) -> None:
        self.keys: dict[str, TrustedKey] = {}
        for key in keys:
            known = self.keys.setdefault(key.keyid, key)
            if (known.owner, known.use) != (key.owner, key.use):
                raise ConfigurationError(
                    f"key {key.keyid} belongs to both {known.owner} and {key.owner}; one key speaks for one owner"
                )

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read ``keys/`` and ``people.toml`` under ``folder``; both may be absent.

        Raises InvalidEvidence (key-altered) for a public key that is not the one its file claims, ConfigurationError
        for a file that cannot be read as described.
        """
        keys = people_keys(load_people(folder))
        for path in sorted((folder / KEYS_FOLDER).glob("*.json")):
            with contextlib.suppress(FileNotFoundError):  # of a process that came second to make the pipeline's key
                keys.append(read_public_key(path))
        return cls(keys)


def key_id(public: str) -> str:
    """Return the id of the Ed25519 public key given as 64 hex digits: securesystemslib's digest of its content."""
    return SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))).keyid


def read_public_key(path: Path) -> TrustedKey:
    """Read one public key file of the pipeline."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=PublicKeyFile)
        actual = key_id(content.keyval.public)
    except (msgspec.DecodeError, ValueError, IsADirectoryError) as error:
        raise InvalidEvidence(Code.KEY_ALTERED, f"{path}: is no Ed25519 public key file ({error})") from None
    if (content.keytype, content.scheme, f"{actual}.json") != ("ed25519", "ed25519", path.name):
        raise InvalidEvidence(Code.KEY_ALTERED, f"{path}: holds the key {actual}, which is not the one its name claims")
    return TrustedKey(
        keyid=actual,
        public=content.keyval.public,
        owner=content.owner,
        use=KeyUse.PIPELINE,
        valid_from=content.valid_from,
        expires_at=content.expires_at,
    )


def accept_public_key(folder: Path, key: TrustedKey) -> None:
    """Trust another pipeline's key from now on; its id must have been compared with what its owner says it is."""
    if key.use is not KeyUse.PIPELINE:
        raise ConfigurationError(f"key {key.keyid} speaks for a person; add {key.owner} to {folder / PEOPLE_FILE}")
    content = {
        "keytype": "ed25519",
        "scheme": "ed25519",
        "keyval": {"public": key.public},
        "owner": key.owner,
        "valid_from": key.valid_from,
        "expires_at": key.expires_at,
    }
    (folder / KEYS_FOLDER).mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        write_once(folder / KEYS_FOLDER / f"{key.keyid}.json", canonical_bytes(content))


def load_people(folder: Path) -> dict[str, Person]:
    """Return the permitted people by name; nobody when there is no ``people.toml``."""
    path = folder / PEOPLE_FILE
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), type=_PeopleFile).people
    except FileNotFoundError:
        return {}
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{path}: {error}; see docs/evidence.md for its form") from None


def people_keys(people: dict[str, Person]) -> list[TrustedKey]:
    """Return every key of every person; a key listed twice by one person is one key."""
    return [
        TrustedKey(keyid=key_id(public), public=public, owner=name, use=KeyUse.PERSON, expires_at=person.expires_at)
        for name, person in people.items()
        for public in (raw_public_key(text, name) for text in person.keys)
    ]


def raw_public_key(text: str, owner: str) -> str:
    """Return the 64 hex digits of an Ed25519 public key given as such or in OpenSSH's form."""
    try:
        if text.startswith("ssh-"):
            key = load_ssh_public_key(text.encode())
            if not isinstance(key, Ed25519PublicKey):
                raise ValueError("it is not Ed25519")
            return key.public_bytes_raw().hex()
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text)).public_bytes_raw().hex()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"a key of {owner} cannot be used ({error}); give an Ed25519 key") from None
