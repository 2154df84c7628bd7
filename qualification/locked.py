"""The packages that a head's own lock names, for the worker that runs it: wheels by hash, cached by the lock's digest.

Nothing of the head is executed to install them: only wheels are taken and nothing is resolved. What the lock leaves out
comes from the installed pipeline. Which locks there are: :mod:`qualification.locks`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from qualification.errors import ConfigurationError
from qualification.home import home
from qualification.locks import Lock

BUILD_SECONDS = 1800


@dataclass(frozen=True)
class LockedPackages:
    """A folder of installed wheels, the SHA-256 of the lock that names them, and their versions by name."""

    folder: Path
    lock_sha256: str
    versions: dict[str, str]


def install_lock(lock: Lock) -> LockedPackages:
    """Install what ``lock`` names, or find it installed. Raises ConfigurationError naming the entry or pip's reason."""
    requirements = lock.requirements()
    digest = hashlib.sha256(lock.content).hexdigest()
    kind = f"{sys.implementation.cache_tag}-{platform.machine()}"
    folder = home() / "environments" / f"{digest}-{kind}"
    if not folder.exists():
        _build(lock.name, requirements, folder)
    found = {one.name: one.version for one in distributions(path=[str(folder)])}
    return LockedPackages(folder, digest, dict(sorted(found.items())))


def _build(name: str, requirements: Sequence[str], folder: Path) -> None:
    """Install aside, then give the folder its name in one step, so that several builders cannot collide."""
    aside = folder.with_name(f".{secrets.token_hex(8)}")
    aside.mkdir(parents=True, mode=0o700)
    file = aside / "requirements.txt"
    file.write_text("".join(f"{line}\n" for line in requirements))
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
            raise ConfigurationError(f"the head's {name} cannot be installed: {said[0][:300]}")
        target.mkdir(exist_ok=True)  # an empty lock installs nothing
        target.rename(folder)
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"the head's {name} was not installed within {BUILD_SECONDS} s") from None
    except OSError:
        if not folder.exists():  # else another builder was quicker, and its folder is the one
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
