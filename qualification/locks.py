"""Which lock of a source names its packages, and what it names, as pinned and hashed requirements.

Read are ``requirements.lock`` and ``requirements.txt`` as pip and uv write them with hashes, and ``pylock.toml``
(https://packaging.python.org/specifications/pylock-toml/). Other tools' own formats are refused by name, with the
command that turns them into one of these. Nothing of a lock may point an installer anywhere: names, versions and hashes
are taken from it, never an address or a path.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from qualification.errors import ConfigurationError

REQUIREMENTS, PYLOCK, LOOSE = "requirements.lock", "pylock.toml", "requirements.txt"
READ = (REQUIREMENTS, PYLOCK, LOOSE)
"""In the order of preference. ``requirements.txt`` is a lock only when every entry has a hash."""

FOREIGN = {
    "uv.lock": "uv export --format pylock.toml --no-emit-project --output-file pylock.toml",
    "poetry.lock": "poetry export --format requirements.txt --output requirements.lock",
    "pdm.lock": "pdm export --format pylock --output pylock.toml",
    "Pipfile.lock": "pipenv requirements --hash > requirements.lock",
    "conda-lock.yml": "pip lock --output pylock.toml",
}
"""Formats that are not read, and what makes one that is."""

_ENTRY = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9,._-]+\])?"  # name and extras
    r"==[A-Za-z0-9.!+_-]+(?:\s*;[A-Za-z0-9_'\"<>=!.() ]*?)?"  # version and marker
    r"(?:\s+--hash=sha256:[0-9a-f]{64})+"
)
_SELECTED = re.compile(r"\b(?:extras|dependency_groups)\b")
_ELSEWHERE = ("vcs", "archive", "directory")


@dataclass(frozen=True)
class Lock:
    """One lock file of a source, as it is there."""

    name: str
    content: bytes

    def requirements(self) -> tuple[str, ...]:
        """Return what it names, one version and its hashes a line. Raises ConfigurationError naming file and entry."""
        return tuple(_from_pylock(self) if self.name == PYLOCK else _entries(self))


def find_lock(names: Collection[str], read: Callable[[str], bytes]) -> Lock | None:
    """Return the lock among the file ``names`` at the root of a source, None when it has none.

    Raises ConfigurationError when there is only one that is not read.
    """
    for name in READ:
        if name in names:
            lock = Lock(name, read(name))
            if name != LOOSE or "--hash=" in _text(lock):
                return lock
    for name, remedy in FOREIGN.items():
        if name in names:
            raise ConfigurationError(f"the head's {name} is not read; commit what this writes beside it: {remedy}")
    return None


def _text(lock: Lock) -> str:
    try:
        return lock.content.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{lock.name} is not UTF-8 text") from None


def _entries(lock: Lock) -> Iterator[str]:
    for number, line in enumerate(_text(lock).replace("\\\n", " ").splitlines(), 1):
        text = line.split(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        if not _ENTRY.fullmatch(text):
            raise ConfigurationError(
                f"{lock.name}, entry {number}: {text[:80]!r} is not NAME==VERSION --hash=sha256:...; "
                "lock exact versions by hash, without options, paths or addresses"
            )
        yield text


def _from_pylock(lock: Lock) -> Iterator[str]:
    try:
        document = tomllib.loads(_text(lock))
        version, packages = str(document["lock-version"]), list(document.get("packages", []))
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{lock.name} is no lock of its format: {error}") from None
    if version.partition(".")[0] != "1":
        raise ConfigurationError(f"{lock.name} has lock-version {version}; 1.0 is read")
    for number, package in enumerate(packages, 1):
        if (line := _package(f"{lock.name}, package {number}", package)) is not None:
            yield line


def _package(where: str, package: Any) -> str | None:  # noqa: ANN401 - whatever the file holds
    """Return a package of a pylock.toml as a requirement; None for the project itself, whose code is the subject."""
    if not isinstance(package, dict):
        raise ConfigurationError(f"{where} is no table")
    if package.get("directory") == {"path": ".", "editable": True}:
        return None
    if elsewhere := [kind for kind in _ELSEWHERE if kind in package]:
        raise ConfigurationError(f"{where} is locked as {elsewhere[0]}; lock a released version with its wheels")
    marker = package.get("marker", "")
    if _SELECTED.search(str(marker)):
        raise ConfigurationError(f"{where} depends on extras or groups that a user chooses; lock without them")
    wheels = package.get("wheels")
    hashes = [_digest(wheel) for wheel in wheels] if isinstance(wheels, list) else []
    text = f"{package.get('name')}=={package.get('version')}{f' ; {marker}' if marker else ''}"
    text += "".join(f" --hash=sha256:{digest}" for digest in dict.fromkeys(hashes))
    if not _ENTRY.fullmatch(text):
        raise ConfigurationError(f"{where}: {text[:80]!r} has no name, version and wheels with SHA-256 hashes")
    return text


def _digest(wheel: Any) -> object:  # noqa: ANN401
    hashes = wheel.get("hashes") if isinstance(wheel, dict) else None
    return hashes.get("sha256") if isinstance(hashes, dict) else None
