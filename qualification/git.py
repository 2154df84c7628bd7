"""Git as plumbing: argument lists only, no hooks, no prompts, no helpers, whatever a repository's own settings say."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from qualification.errors import ConfigurationError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SCP_ADDRESS = re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:[^:].*")
_REFERENCE = re.compile(r"refs/(?:heads|tags|pull)/[A-Za-z0-9][A-Za-z0-9._/+-]*")
_REMOTE_SECONDS = 20.0
_SCHEMES = ("https", "ssh")
_HARDENED = (
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "protocol.ext.allow=never"),
    *("-c", "submodule.recurse=false"),
    *("-c", "advice.detachedHead=false"),
    *("-c", "gc.auto=0"),
)


def git(folder: Path, *arguments: str, standard_input: bytes | None = None, timeout: float = 300.0) -> bytes:
    """Run git in ``folder`` and return its output; raise ConfigurationError with git's first line otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    try:
        done = subprocess.run(
            ["git", *_HARDENED, *arguments],
            cwd=folder,
            env=environment,
            input=standard_input,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, ValueError) as error:  # no git, no folder, or a NUL byte in an argument
        raise ConfigurationError(f"git {arguments[0]} could not start in {folder}: {error}") from None
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"git {arguments[0]} in {folder} took longer than {timeout:.0f} s") from None
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigurationError(f"git {arguments[0]} in {folder}: {words[0]}")
    return done.stdout


def require_commit(text: str) -> str:
    """Return ``text`` if it is a full commit id; a branch, a short or an upper-case id is refused by name."""
    if not _COMMIT.fullmatch(text):
        raise ConfigurationError(f"head {text!r} is not a commit id: give all 40 hexadecimal digits, in lower case")
    return text


def require_reference(text: str) -> str:
    """Return ``text`` if it is the full name of a branch, tag or pull request, for example ``refs/heads/main``."""
    if not _REFERENCE.fullmatch(text) or ".." in text or text.endswith((".lock", "/", ".")):
        raise ConfigurationError(f"reference {text!r} is not a full name such as refs/heads/main or refs/pull/7/head")
    return text


def read_reference(address: str, reference: str) -> str:
    """Return the commit that a reference of a repository names now."""
    place, name = require_repository(address), require_reference(reference)
    listed = git(Path("/"), "ls-remote", "--exit-code", "--", place, name, timeout=_REMOTE_SECONDS)
    for line in listed.decode("utf-8", "replace").splitlines():
        commit, _, listed_name = line.partition("\t")
        if listed_name == name:
            return require_commit(commit)
    raise ConfigurationError(f"{name} is not a reference of the repository")


def require_repository(address: str) -> str:
    """Return ``address`` if it is a local folder, or an https or ssh address without a password."""
    if _SCP_ADDRESS.fullmatch(address):
        return address
    parts = urlsplit(address)
    if parts.scheme in _SCHEMES and parts.hostname and not parts.hostname.startswith("-"):
        if parts.password or (parts.scheme == "https" and parts.username):
            raise ConfigurationError(
                f"the address of repository {parts.hostname} carries credentials: use a git credential helper"
            )
        return address
    if address and not parts.scheme and not address.startswith("-") and Path(address).is_dir():
        return str(Path(address).resolve())
    shown = address.rsplit("@", 1)[-1]  # what stands before may be a secret
    raise ConfigurationError(f"repository {shown!r} is neither a local folder nor an https:// or ssh address")
