"""Checkpoints that are whole or absent: files, then a manifest of their hashes, published by one rename.

A checkpoint is a folder: one safetensors file per slot, and ``manifest.json`` naming each file with size and SHA-256.
It is written beside its place and renamed into it once everything is on disk; an existing one is never overwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors

from trainer_rank.errors import CheckpointError
from trainer_rank.folders import sync_folder

FORMAT = 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True, eq=False)
class Group:
    """What is saved and loaded together: per file name its tensors (on the host), and plain metadata.

    ``manifest``: the SHA-256 of the manifest that it was loaded with.
    """

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    metadata: Mapping[str, Any]
    manifest: str | None = None


def save(path: Path, group: Group) -> str:
    """Publish a group at ``path`` and return the SHA-256 of its manifest.

    Raises CheckpointError when something is there already, or when it cannot be written; nothing is left behind then.
    """
    if path.exists():
        raise CheckpointError(f"checkpoint {path} exists and is never overwritten; give another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be written: {error.strerror}") from error
    try:
        digest = _write(draft, group)
        draft.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be written: {error.strerror}; nothing was kept") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(draft)
    return digest


def load(path: Path) -> Group:
    """Read a group and check every file against the manifest.

    Raises CheckpointError naming the file that is missing, torn, altered or unexpected.
    """
    manifest, digest = _read_manifest(path)
    listed: dict[str, dict[str, Any]] = manifest["files"]
    try:
        extra = sorted({entry.name for entry in path.iterdir()} - {*listed, _MANIFEST})
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if extra:
        raise CheckpointError(f"checkpoint {path}: {extra[0]} is not in the manifest; load an unaltered checkpoint")
    tensors = {name: _read_file(path / name, entry) for name, entry in listed.items()}
    named = {name.removesuffix(".safetensors"): each for name, each in tensors.items()}
    return Group(named, manifest["metadata"], digest)


def _write(draft: Path, group: Group) -> str:
    files = {}
    for name, tensors in group.tensors.items():
        content = dump_tensors(dict(tensors))
        files[f"{name}.safetensors"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        _write_file(draft / f"{name}.safetensors", content)
    manifest = {"format": FORMAT, "files": files, "metadata": dict(group.metadata)}
    content = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    _write_file(draft / _MANIFEST, content)
    sync_folder(draft)
    return hashlib.sha256(content).hexdigest()


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> tuple[dict[str, Any], str]:
    try:
        content = (path / _MANIFEST).read_bytes()
        manifest = json.loads(content)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} has no readable manifest: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: its manifest is no JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {path}: its manifest is not of format {FORMAT}; use the version that wrote it"
        )
    files, metadata = manifest.get("files"), manifest.get("metadata")
    whole = (
        isinstance(files, dict)
        and isinstance(metadata, dict)
        and all(isinstance(entry, dict) and Path(name).name == name for name, entry in files.items())
    )
    if not whole:
        raise CheckpointError(f"checkpoint {path}: its manifest lists no files; load an unaltered checkpoint")
    return manifest, hashlib.sha256(content).hexdigest()


def _read_file(path: Path, entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read: {error.strerror}") from error
    if len(content) != entry.get("size") or hashlib.sha256(content).hexdigest() != entry.get("sha256"):
        raise CheckpointError(f"checkpoint file {path} differs from its manifest; load an unaltered checkpoint")
    try:
        return dict(load_tensors(content))
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint file {path} holds no tensors: {error}") from error
