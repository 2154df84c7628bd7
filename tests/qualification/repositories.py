"""Small real git repositories for tests."""

from __future__ import annotations

from pathlib import Path

from qualification.git import git

IDENTITY = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false")


def make_repository(folder: Path, files: dict[str, str] | None = None) -> str:
    """Create a repository whose trainer_rank holds ``files`` (text by path); return its commit."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    return commit_files(folder, {"trainer_rank/__init__.py": "", **(files or {})})


def commit_files(folder: Path, files: dict[str, str]) -> str:
    """Write files, commit everything and return the commit."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "--all")
    git(folder, *IDENTITY, "commit", "--quiet", "--allow-empty", "--message", "change")
    return git(folder, "rev-parse", "HEAD").decode().strip()
