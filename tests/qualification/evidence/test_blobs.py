"""Blobs are complete or absent, never followed, never overwritten, and named by what they hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest

from qualification.evidence.blobs import BlobError, BlobStore, is_digest
from qualification.evidence.files import INCOMING, write_once
from qualification.evidence.findings import Code, InvalidEvidence

LIMITED = """
import resource, signal, sys
from pathlib import Path
from qualification.evidence.blobs import BlobStore
store = BlobStore(Path(sys.argv[1]))
store.put(b"small")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
store.put(bytes(100_000))
"""
SLOW = """
import sys, time
from pathlib import Path
from qualification.evidence.blobs import BlobStore
def chunks():
    yield bytes(1000)
    print("writing", flush=True)
    time.sleep(60)
BlobStore(Path(sys.argv[1])).put_chunks(chunks())
"""


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


def _temporary(store: BlobStore) -> list[Path]:
    return [path for path in store.folder.iterdir() if path.name.startswith(INCOMING)]


def test_the_folder_is_an_oci_image_layout(store: BlobStore) -> None:
    digest = store.put(b"content")
    assert json.loads((store.root / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    assert json.loads((store.root / "index.json").read_bytes())["schemaVersion"] == 2
    assert (store.root / "blobs" / "sha256" / digest).read_bytes() == b"content"
    assert digest == sha256(b"content").hexdigest()
    assert store.read(digest) == b"content"
    assert (store.check(digest), store.check(digest, 7)) == (7, 7)


@pytest.mark.parametrize("content", [b"", b"x", bytes(3 << 20)])
def test_the_same_bytes_are_one_blob(store: BlobStore, content: bytes) -> None:
    first = store.put(content)
    before = store.path(first).stat()
    assert store.put_chunks(content[start : start + 1000] for start in range(0, len(content), 1000)) == first
    assert store.path(first).stat().st_ino == before.st_ino
    assert list(store.names()) == [first]


def test_many_writers_of_the_same_blob_at_once(store: BlobStore) -> None:
    threads = [threading.Thread(target=store.put, args=(b"shared" * 10_000,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(store.names()) == [sha256(b"shared" * 10_000).hexdigest()]
    assert _temporary(store) == []


def test_a_blob_that_is_too_large_fails_and_is_not_cut(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, maximum=10)
    assert store.put(bytes(10))
    with pytest.raises(BlobError, match="larger than 10 bytes"):
        store.put_chunks([bytes(6), bytes(5)])
    assert len(list(store.names())) == 1
    assert _temporary(store) == []


def test_a_disk_without_room_fails_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1].endswith("free some space and run again")
    store = BlobStore(tmp_path)
    assert list(store.names()) == [sha256(b"small").hexdigest()]
    assert _temporary(store) == []


def test_a_writer_that_is_killed_leaves_no_blob(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    store = BlobStore(tmp_path)
    assert list(store.names()) == []
    assert len(_temporary(store)) == 1
    os.utime(_temporary(store)[0], (time.time() - 90_000,) * 2)
    store.put(b"the next writer clears what was left behind long ago")
    assert _temporary(store) == []


@pytest.mark.parametrize(
    "name", ["", "..", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 64 + "\n", f"../{'a' * 61}", "/" * 64]
)
def test_a_name_that_is_no_digest_is_never_a_path(store: BlobStore, name: str) -> None:
    assert not is_digest(name)
    with pytest.raises(ValueError, match="no SHA-256 digest"):
        store.path(name)


def test_a_link_is_neither_followed_nor_replaced(store: BlobStore, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"content")
    digest = sha256(b"content").hexdigest()
    store.create()
    store.path(digest).symlink_to(elsewhere)
    assert not store.has(digest)
    for use in (store.read, store.check):
        with pytest.raises(InvalidEvidence) as raised:
            use(digest)
        assert raised.value.code is Code.BLOB_UNSAFE
    with pytest.raises(InvalidEvidence):
        store.put(b"content")
    assert elsewhere.read_bytes() == b"content"


def test_a_blob_with_other_bytes_is_not_taken_for_the_one_to_write(store: BlobStore) -> None:
    digest = store.put(b"content")
    store.path(digest).write_bytes(b"another")
    with pytest.raises(InvalidEvidence) as raised:
        store.put(b"content")
    assert raised.value.code is Code.BLOB_ALTERED


def test_a_missing_blob_and_a_wrong_size_are_told_apart(store: BlobStore) -> None:
    with pytest.raises(InvalidEvidence) as missing:
        store.read("a" * 64)
    assert missing.value.code is Code.BLOB_MISSING
    digest = store.put(b"content")
    with pytest.raises(InvalidEvidence, match="has 7 bytes, recorded are 8"):
        store.check(digest, 8)
    store.remove(digest)
    store.remove(digest)
    assert not store.has(digest)


def test_a_file_is_written_once(tmp_path: Path) -> None:
    write_once(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        write_once(tmp_path / "file", b"second")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"first"]
