"""Public projections of raw artifacts: the same document without token ids, credentials, home folders or host names.

An artifact in which nothing has to be taken out is public itself. One of a form that cannot be looked into is private
as a whole. Original and projection are both blobs, and the projection names the original's digest.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import zlib
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from qualification.evidence.blobs import BlobStore
from qualification.evidence.canonical import sha256
from qualification.records import Artifact

LARGEST = 32 << 20
"""Bytes up to which a document is looked into; a larger one stays private as a whole."""
PUBLIC_SUFFIX = ".public"

_COMPRESSED = {".json.gz": "application/json", ".jsonl.gz": "application/jsonl", ".log.gz": "text/plain"}
_TOKEN_FIELDS = frozenset(
    ("tokens", "token_ids", "input_ids", "targets", "labels", "prompt", "prompts", "completion", "completions", "text")
)
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_PATTERNS = tuple(
    (re.compile(pattern), into)
    for pattern, into in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", "[private key]"),
        (r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-)[A-Za-z0-9_-]{8,}", "[credential]"),
        (r"\bAKIA[0-9A-Z]{16}\b", "[credential]"),
        (r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*", "[credential]"),
        (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", r"\1 [credential]"),
        (r"(?i)\b([\w-]*(?:token|secret|password|passwd|api[_-]?key))(\s*[=:]\s*)[^\s,;'\"&]{6,}", r"\1\2[credential]"),
        (r"://[^\s/:@]+(?::[^\s/@]*)?@", "://[credential]@"),
        (r"/(?:home|Users)/[^\s/:'\"]+", "~"),
        (r"/root(?=/)", "~"),
    )
)


def with_projection(store: BlobStore, artifact: Artifact) -> tuple[Artifact, ...]:
    """Return the artifact, marked private where that is needed, and its public projection where one can be made.

    The artifact's blob must be in ``store``; the projection's is stored.
    """
    if artifact.size > LARGEST:
        return (replace(artifact, private=True),)
    content = store.read(artifact.sha256)
    public = sanitised(content, artifact.media_type, artifact.name)
    if public == content:
        return (artifact,)
    private = replace(artifact, private=True)
    if public is None:
        return (private,)
    projection = replace(
        artifact,
        name=artifact.name + PUBLIC_SUFFIX,
        sha256=store.put(public),
        size=len(public),
        private=False,
        projection_of=artifact.sha256,
    )
    return private, projection


def sanitised(content: bytes, media_type: str, name: str = "") -> bytes | None:
    """Return a document's public form, the same bytes when nothing had to go, None when it cannot be looked into.

    A gzipped document is looked into when its name says what is inside, for example ``steps.json.gz``.
    """
    inner_type = _COMPRESSED.get("".join(Path(name).suffixes[-2:])) if media_type == "application/gzip" else None
    if inner_type is not None:
        return _sanitised_inside(content, inner_type)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if media_type == "application/json":
        clean = _clean_json(text)
    elif media_type == "application/jsonl":
        clean = "".join(_clean_json(line) for line in text.splitlines(keepends=True))
    elif media_type.startswith("text/") or media_type == "application/toml":
        clean = clean_text(text)
    else:
        return None
    return clean.encode("utf-8", "surrogatepass")


def _sanitised_inside(content: bytes, inner_type: str) -> bytes | None:
    expander = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        inner = expander.decompress(content, LARGEST)
    except zlib.error:
        return None
    if not expander.eof or expander.unused_data:  # larger than may be looked into, cut, or more than one member
        return None
    public = sanitised(inner, inner_type)
    if public is None or public == inner:
        return content if public == inner else None
    return gzip.compress(public, mtime=0)


def clean_text(text: str) -> str:
    """Take credentials, home folders and this host's name out of a text."""
    for secret in _secrets():
        text = text.replace(secret, "[credential]")
    for pattern, into in _PATTERNS:
        text = pattern.sub(into, text)
    host = platform.node()
    return re.sub(rf"\b{re.escape(host)}\b", "[host]", text) if len(host) >= 4 else text


def _clean_json(text: str) -> str:
    """Clean one JSON document; what is no JSON is cleaned as text. A document that is clean comes back as it was."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return clean_text(text)
    clean = _clean_value(value)
    if clean is value:
        return text if clean_text(text) == text else clean_text(text)
    return json.dumps(clean, ensure_ascii=False) + ("\n" if text.endswith("\n") else "")


def _clean_value(value: object, name: str = "") -> object:
    """Return ``value`` itself when there is nothing to take out of it."""
    if name.lower() in _TOKEN_FIELDS and isinstance(value, list | str) and value:
        digest = sha256(json.dumps(value, sort_keys=True).encode())
        return {"withheld": name, "count": len(value), "sha256": digest}
    if isinstance(value, str):
        clean = "[credential]" if value and _SECRET_NAMES.search(name) else clean_text(value)
        return value if clean == value else clean
    if isinstance(value, dict):
        made = {key: _clean_value(item, key) for key, item in value.items()}
        return value if all(made[key] is item for key, item in value.items()) else made
    if isinstance(value, list):
        items = [_clean_value(item, name if isinstance(item, list) else "") for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value


@lru_cache(maxsize=1)
def _secrets() -> tuple[str, ...]:
    """Return the secret values of this process's environment, and its home folder is not one of them."""
    values = {value for name, value in os.environ.items() if _SECRET_NAMES.search(name) and len(value) >= 8}
    return tuple(sorted((value for value in values if not Path(value).is_dir()), key=len, reverse=True))
