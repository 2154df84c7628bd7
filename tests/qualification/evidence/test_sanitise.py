"""What leaves the house: projections without tokens, credentials, homes and host names; originals stay private."""

from __future__ import annotations

import gzip
import json
import platform
from hashlib import sha256
from pathlib import Path

import pytest

from qualification.evidence import sanitise
from qualification.evidence.blobs import BlobStore
from qualification.evidence.sanitise import clean_text, sanitised, with_projection
from qualification.records import Artifact

PLANTED = "ghp_PlantedTokenOfTheTests0123456789"


def _artifact(store: BlobStore, content: bytes, media_type: str = "application/json") -> Artifact:
    return Artifact(name="report.json", sha256=store.put(content), size=len(content), media_type=media_type)


@pytest.mark.parametrize(
    "content",
    [b'{"steps": [1, 2.50, NaN],  "loss":2.75}', b"[]", b'{"packed_tokens": 4096, "tokens": 12}', b'{"tokens": []}'],
)
def test_a_clean_document_is_public_as_it_is(tmp_path: Path, content: bytes) -> None:
    store = BlobStore(tmp_path)
    artifact = _artifact(store, content)
    assert with_projection(store, artifact) == (artifact,)


def test_token_ids_are_withheld_and_everything_else_kept(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    document = {"requests": [{"length": 3, "tokens": [17, 4242, 9]}], "prompt": "say nothing", "peak": 123}
    original, projection = with_projection(store, _artifact(store, json.dumps(document).encode()))
    assert (original.private, projection.private) == (True, False)
    assert projection.projection_of == original.sha256
    assert projection.name == "report.json.public"
    public = json.loads(store.read(projection.sha256))
    assert public["peak"] == 123
    assert public["requests"][0]["length"] == 3
    assert public["requests"][0]["tokens"]["count"] == 3
    assert b"4242" not in store.read(projection.sha256)
    assert b"say nothing" not in store.read(projection.sha256)
    assert sha256(store.read(original.sha256)).hexdigest() == original.sha256


@pytest.mark.parametrize(
    "text",
    [
        f"pushing with {PLANTED} now",
        f"Authorization: Bearer {PLANTED}",
        f"https://someone:{PLANTED}@example.org/x.git",
        f"MY_API_KEY={PLANTED}",
        f'{{"password": "{PLANTED}"}}',
        f"password: {PLANTED[::-1]}{PLANTED}",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{PLANTED}\n-----END OPENSSH PRIVATE KEY-----",
    ],
)
def test_credentials_are_taken_out(text: str) -> None:
    assert PLANTED not in clean_text(text)
    cleaned = sanitised(json.dumps({"log": [text]}).encode(), "application/json")
    assert cleaned is not None
    assert PLANTED.encode() not in cleaned


def test_a_secret_of_the_environment_is_taken_out_whatever_it_looks_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_TOKEN", "plain words as a secret")
    sanitise._secrets.cache_clear()
    assert clean_text("it said plain words as a secret") == "it said [credential]"
    monkeypatch.delenv("DEPLOY_TOKEN")
    sanitise._secrets.cache_clear()


def test_homes_and_host_are_taken_out_of_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "gpu-host-7")
    log = b"gpu-host-7: File /home/alice/work/rank.py, line 3, in /root/x\nplain line\n"
    cleaned = sanitised(log, "text/plain")
    assert cleaned is not None
    assert b"alice" not in cleaned
    assert b"/root" not in cleaned
    assert b"gpu-host-7" not in cleaned
    assert b"plain line\n" in cleaned


@pytest.mark.parametrize(
    ("content", "media_type"), [(b"\x89PNG\r\n", "image/png"), (b"\xff\xfe", "text/plain"), (b"{}", "application/gzip")]
)
def test_what_cannot_be_looked_into_is_private_as_a_whole(tmp_path: Path, content: bytes, media_type: str) -> None:
    store = BlobStore(tmp_path)
    (only,) = with_projection(store, _artifact(store, content, media_type))
    assert only.private


def test_a_compressed_document_is_looked_into_by_its_name() -> None:
    clean = gzip.compress(b'{"events": [[1, 2]]}', mtime=0)
    assert sanitised(clean, "application/gzip", "step-0001.trace.json.gz") == clean
    assert sanitised(clean, "application/gzip", "step-0001.gz") is None
    public = sanitised(gzip.compress(b'{"tokens": [4242]}'), "application/gzip", "a.json.gz")
    assert public is not None
    assert b"4242" not in gzip.decompress(public)


@pytest.mark.parametrize("tail", [b"more", gzip.compress(b"hidden"), b"\0" * 9])
def test_what_follows_a_compressed_document_keeps_it_private(tail: bytes) -> None:
    content = gzip.compress(b"{}") + tail
    assert sanitised(content, "application/gzip", "a.json.gz") is None
    assert sanitised(content[:15], "application/gzip", "a.json.gz") is None


def test_a_compressed_document_that_is_too_large_stays_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitise, "LARGEST", 1000)
    assert sanitised(gzip.compress(bytes(2000)), "application/gzip", "a.log.gz") is None


def test_lines_of_json_are_cleaned_one_by_one_and_broken_ones_as_text() -> None:
    lines = b'{"event": "step"}\n{"tokens": [5, 6]}\nnot json /home/bob/x\n'
    cleaned = sanitised(lines, "application/jsonl")
    assert cleaned is not None
    first, second, third = cleaned.decode().splitlines()
    assert first == '{"event": "step"}'
    assert json.loads(second)["tokens"]["count"] == 2
    assert third == "not json ~/x"
