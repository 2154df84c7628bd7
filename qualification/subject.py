"""Which source a run qualifies: commit, tree, dirty or not, and the SHA-256 of every file of ``trainer_rank``.

Everything is read through git plumbing or as plain bytes; the subject's code is never imported here.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from qualification.errors import ConfigurationError
from qualification.git import git, require_commit
from qualification.records import Subject

PACKAGE = "trainer_rank"
_REGULAR_FILES = (b"100644", b"100755")


def installed_checkout() -> Path:
    """Return the root of the git checkout that ``trainer_rank`` is imported from; it is located, not imported."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ConfigurationError(f"{PACKAGE} is not installed here; install it, or give --repo and --head")
    folder = Path(found.origin).resolve().parent
    try:
        root = Path(git(folder, "rev-parse", "--show-toplevel").decode().rstrip("\n"))
    except ConfigurationError:
        root = Path("/")
    if folder != root / PACKAGE:
        raise ConfigurationError(
            f"{PACKAGE} is installed in {folder}, outside a git checkout, so its commit is unknown; "
            "run from a checkout, or give --repo and --head"
        )
    return root


def subject_of_checkout(root: Path) -> Subject:
    """Identify the working tree at ``root`` as it is now, uncommitted changes included and said so."""
    try:
        commit = require_commit(git(root, "rev-parse", "--verify", "HEAD^{commit}").decode().strip())
    except ConfigurationError as error:
        raise ConfigurationError(f"{root} has no commit to name: {error}") from None
    origin = _origin(root) or str(root)
    return _subject(root, commit, label=repository_label(origin), dirty=is_dirty(root), files=working_files(root))


def subject_of_commit(repository: Path, commit: str, *, address: str, reference: str | None = None) -> Subject:
    """Identify a commit from the objects of ``repository``, which holds what was fetched from ``address``."""
    files = committed_files(repository, require_commit(commit))
    label = repository_label(address)
    return _subject(repository, commit, label=label, dirty=False, files=files, reference=reference)


def is_dirty(root: Path) -> bool:
    """Whether the working tree differs from its commit, untracked files that are not ignored included."""
    return bool(git(root, "status", "--porcelain", "-z", "--untracked-files=normal", "--ignore-submodules=none"))


def working_files(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of trainer_rank in the working tree at ``root``, by path."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", PACKAGE)
    names = sorted({name.decode() for name in listed.split(b"\0") if name})
    present = [(name, root / name) for name in names]
    for name, path in present:
        if path.is_symlink():
            raise ConfigurationError(f"{name} is a symbolic link; {PACKAGE} may hold plain files only")
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in present if path.is_file()}


def committed_files(repository: Path, commit: str) -> dict[str, str]:
    """Return the SHA-256 of each file of trainer_rank in ``commit``, by path; links and submodules are refused."""
    listed = git(repository, "ls-tree", "-r", "-z", "--full-tree", commit, "--", PACKAGE)
    names, objects = [], []
    for row in listed.split(b"\0"):
        if not row:
            continue
        about, _, name = row.partition(b"\t")
        mode, _, identity = about.split(b" ")
        if mode not in _REGULAR_FILES:
            raise ConfigurationError(
                f"{name.decode(errors='replace')} in {commit} is a link or a submodule, not a file"
            )
        names.append(name.decode())
        objects.append(identity)
    if f"{PACKAGE}/__init__.py" not in names:
        raise ConfigurationError(f"commit {commit} holds no package {PACKAGE}")
    contents = _contents(git(repository, "cat-file", "--batch", standard_input=b"\n".join(objects) + b"\n"))
    return {name: hashlib.sha256(content).hexdigest() for name, content in zip(names, contents, strict=True)}


def manifest(files: dict[str, str]) -> bytes:
    """Return the files and their hashes as ``sha256sum`` writes and checks them, sorted by path."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items())).encode()


def _contents(batch: bytes) -> list[bytes]:
    contents, position = [], 0
    while position < len(batch):
        end = batch.index(b"\n", position)
        size = int(batch[position:end].split(b" ")[2])
        contents.append(batch[end + 1 : end + 1 + size])
        position = end + 1 + size + 1
    return contents


def _subject(
    repository: Path,
    commit: str,
    *,
    label: str,
    dirty: bool,
    files: dict[str, str],
    reference: str | None = None,
) -> Subject:
    return Subject(
        repository=label,
        commit=commit,
        tree=git(repository, "rev-parse", "--verify", f"{commit}^{{tree}}").decode().strip(),
        dirty=dirty,
        files=files,
        manifest_sha256=hashlib.sha256(manifest(files)).hexdigest(),
        reference=reference,
        authors=authors(repository, commit),
    )


def authors(repository: Path, commit: str) -> tuple[str, ...]:
    """Return the e-mail addresses that git names as author and committer of ``commit``, each once."""
    named = git(repository, "show", "--no-patch", "--no-mailmap", "--format=%ae%n%ce", commit).decode(errors="replace")
    return tuple(dict.fromkeys(address for address in named.splitlines() if address))


def repository_label(address: str) -> str:
    """Name a repository without a local path or a credential: host and path, or ``local:<folder>``."""
    remote = "://" in address or "@" in address
    return address.split("://", 1)[-1].rsplit("@", 1)[-1] if remote else f"local:{Path(address).name}"


def _origin(root: Path) -> str | None:
    try:
        return git(root, "config", "--get", "remote.origin.url").decode().strip()
    except ConfigurationError:
        return None
