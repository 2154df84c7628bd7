"""The packages that a head's own lock names, for the worker that runs it: wheels by hash, cached by the lock's digest.

Nothing of the head is executed to install them: only wheels are taken, nothing is resolved, and a line of the lock may
name a version and its hashes and nothing else, so that it cannot point the installer elsewhere. What the lock leaves
out comes from the installed pipeline.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from qualification.errors import ConfigurationError
from qualification.home import home

LOCK_FILE = "requirements.lock"
BUILD_SECONDS = 1800
_LINE = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9,._-]+\])?"  # name and extras
    r"==[A-Za-z0-9.!+_-]+(?:\s*;[A-Za-z0-9_'\"<>=!.() ]*?)?"  # version and marker
    r"(?:\s+--hash=sha256:[0-9a-f]{64})+"
)


@dataclass(frozen=True)
class LockedPackages:
    """A folder of installed wheels, the SHA-256 of the lock that names them, and their versions by name."""

    folder: Path
    lock_sha256: str
    versions: dict[str, str]


def install_lock(lock: bytes) -> LockedPackages:
    """Install what ``lock`` names, or find it installed. Raises ConfigurationError naming the line or pip's reason."""
    check_lock(lock)
    digest = hashlib.sha256(lock).hexdigest()
    kind = f"{sys.implementation.cache_tag}-{platform.machine()}"
    folder = home() / "environments" / f"{digest}-{kind}"
    if not folder.exists():
        _build(lock, folder)
    found = {one.name: one.version for one in distributions(path=[str(folder)])}
    return LockedPackages(folder, digest, dict(sorted(found.items())))


def check_lock(lock: bytes) -> None:
    """Raise ConfigurationError for a line that names anything but one version and its hashes."""
    try:
        joined = lock.decode().replace("\\\n", " ")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{LOCK_FILE} is not UTF-8 text") from None
    for number, line in enumerate(joined.splitlines(), 1):
        text = line.split(" #")[0].strip()
        if text and not text.startswith("#") and not _LINE.fullmatch(text):
            raise ConfigurationError(
                f"{LOCK_FILE}, entry {number}: {text[:80]!r} is not NAME==VERSION --hash=sha256:...; "
                "lock exact versions by hash, without options, paths or addresses"
            )


def _build(lock: bytes, folder: Path) -> None:
    """Install aside, then give the folder its name in one step, so that several builders cannot collide."""
    aside = folder.with_name(f".{secrets.token_hex(8)}")
    aside.mkdir(parents=True, mode=0o700)
    file = aside / LOCK_FILE
    file.write_bytes(lock)
    target = aside / "packages"
    options = ("--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:")
    command = [sys.executable, "-P", "-m", "pip", "install", *options, "--require-hashes"]
    try:
        done = subprocess.run(
            [*command, "--target", str(target), "--requirement", str(file)],
            cwd=aside,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
            raise ConfigurationError(f"the head's {LOCK_FILE} cannot be installed: {said[0][:300]}")
        target.mkdir(exist_ok=True)  # an empty lock installs nothing
        target.rename(folder)
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"the head's {LOCK_FILE} was not installed within {BUILD_SECONDS} s") from None
    except OSError:
        if not folder.exists():  # else another builder was quicker, and its folder is the one
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
