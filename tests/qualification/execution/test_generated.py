"""What a compiler generated in a failed run is hashed and kept before its caches are retired; of a good run nothing."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from flows.raw_data import collect
from qualification.evidence.blobs import BlobStore
from qualification.execution import generated
from qualification.execution.environment import cache_folder, child_environment
from qualification.execution.probes.host import retire
from qualification.execution.supervision import OUTCOME_FILE, Ending, Outcome


class _Run:
    """A launch folder with private caches as a worker left them, and its output."""

    def __init__(self, folder: Path) -> None:
        self.launch, self.output = folder / "launch", folder / "launch" / "output"
        self.launch.mkdir()
        (self.output / "reports").mkdir(parents=True)
        self.caches = child_environment(self.launch)
        self.blobs = BlobStore(folder / "home")

    def generate(self, name: str, content: str, age: int = 0) -> str:
        path = Path(self.caches["TORCHINDUCTOR_CACHE_DIR"]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, ns=(10**18, 10**18 - age))
        return sha256(content.encode()).hexdigest()

    def end(self, exit_code: int) -> None:
        outcome = Outcome(
            ending=Ending.EXITED, exit_code=exit_code, swept=(), leftovers=(), duration_ms=1, sweep_ms=1, kill_ms=None,
            containment="test",
        )  # fmt: skip
        (self.launch / OUTCOME_FILE).write_bytes(msgspec.json.encode(outcome))

    def fail(self, *hashes: str) -> None:
        report = {"kind": "out_of_memory", "failure": {"generated": [{"name": "x", "sha256": each} for each in hashes]}}
        (self.output / "reports" / "a.report.json").write_text(json.dumps(report))

    def kept(self) -> dict[str, str]:
        found = collect(self.launch, self.output, self.blobs)
        assert found.problems == ()
        return {
            one.name.removeprefix("launcher:generated/torchinductor_cache/"): one.sha256
            for one in found.artifacts
            if one.name.startswith("launcher:generated/")
        }

    def index(self) -> list[dict[str, object]]:
        files: list[dict[str, object]] = json.loads((self.launch / generated.INDEX).read_bytes())["files"]
        return files


@pytest.fixture
def run(tmp_path: Path) -> _Run:
    return _Run(tmp_path)


def test_code_of_a_failed_command_outlives_its_caches(run: _Run) -> None:
    digest = run.generate("ab/cab.py", "def call(args): ...\n")
    run.generate("ab/cab.so", "binary")
    run.end(1)
    assert retire([run.launch])
    assert not cache_folder(run.launch).exists()
    assert run.kept() == {"ab/cab.py": digest}
    assert run.blobs.read(digest) == b"def call(args): ...\n"
    assert run.index() == [
        {"name": "torchinductor_cache/ab/cab.py", "size": 20, "sha256": digest, "on_stack": False, "kept": True}
    ]


def test_code_of_a_failure_that_a_worker_survived_is_kept_too_and_that_of_a_good_run_is_not(run: _Run) -> None:
    digest = run.generate("cab.py", "x")
    run.end(0)
    assert run.kept() == {}
    assert not (run.launch / generated.INDEX).exists()
    run.fail(digest)
    assert run.kept() == {"cab.py": digest}
    assert run.index()[0]["on_stack"] is True


def test_what_the_stack_names_comes_first_then_the_latest_and_the_rest_is_listed(
    run: _Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = run.generate("old.py", "old", age=300)
    recent = run.generate("recent.py", "recent", age=100)
    left = run.generate("left.py", "left", age=200)
    run.fail(old)
    run.end(1)
    monkeypatch.setattr(generated, "MOST_FILES", 2)
    assert run.kept() == {"old.py": old, "recent.py": recent}
    assert [(row["sha256"], row["kept"]) for row in run.index()] == [(old, True), (recent, True), (left, False)]


def test_links_are_not_followed_and_what_cannot_be_read_is_passed_over(run: _Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    Path(run.caches["TRITON_CACHE_DIR"], "link.txt").symlink_to(secret)
    run.end(1)
    (run.launch / generated.FOLDER).symlink_to(tmp_path)
    assert run.kept() == {}
    assert secret.exists()
    retire([run.launch])
    (run.launch / generated.FOLDER).symlink_to(tmp_path)
    assert run.kept() == {}
    cache_folder(run.launch).symlink_to(tmp_path)
    assert run.kept() == {}


def test_what_a_worker_put_in_the_place_of_kept_code_is_removed(run: _Run) -> None:
    digest = run.generate("cab.py", "x")
    (run.launch / generated.FOLDER).mkdir()
    (run.launch / generated.FOLDER / "forged.py").write_text("y")
    (run.launch / generated.INDEX).write_text("{}")
    run.end(1)
    assert run.kept() == {"cab.py": digest}
    run.end(0)
    assert run.kept() == {}
    assert not (run.launch / generated.INDEX).exists()
