"""What a worker leaves is kept as it is or named as missing; nothing is followed, and nothing passes by halves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from flows import raw_data, workload
from flows.raw_data import collect
from qualification.evidence.blobs import BlobStore
from qualification.execution.capture import Stamped
from qualification.execution.launch import Launched
from qualification.execution.supervision import Ending
from qualification.records import Basis, Criterion, Verdict

PLANTED = "ghp_0123456789abcdefghijABCDEFGHIJ"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, BlobStore]:
    launch, output = tmp_path / "launch", tmp_path / "output"
    launch.mkdir()
    (output / "inner").mkdir(parents=True)
    return launch, output, BlobStore(tmp_path / "home")


def test_files_become_blobs_and_private_ones_get_a_projection(folders: tuple[Path, Path, BlobStore]) -> None:
    launch, output, blobs = folders
    (output / "inner" / "steps.json").write_text('{"loss": 2.5}')
    (output / "requests.json").write_text(json.dumps({"tokens": [4242, 17], "length": 2}))
    (launch / "rank-0.stderr.log").write_text(f"using {PLANTED}\n")
    kept = collect(launch, output, blobs)
    shown = {one.name: one for one in kept.artifacts}
    assert kept.problems == ()
    assert not shown["inner/steps.json"].private
    assert shown["requests.json"].private
    assert shown["requests.json.public"].projection_of == shown["requests.json"].sha256
    assert kept.files["requests.json"].read_text() == '{"tokens": [4242, 17], "length": 2}'
    public = [blobs.read(one.sha256) for one in kept.artifacts if not one.private]
    assert not any(PLANTED.encode() in content or b"4242" in content for content in public)


def test_links_pipes_and_too_many_files_are_named_and_not_kept(
    folders: tuple[Path, Path, BlobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, output, blobs = folders
    (output / "a-link").symlink_to("/etc/passwd")
    (output / "b-folder").symlink_to("/etc")
    os.mkfifo(output / "c-pipe")
    monkeypatch.setattr(raw_data, "MOST_FILES", 2)
    for number in range(4):
        (output / f"d{number}.json").write_text("[]" * number)
    kept = collect(launch, output, blobs)
    assert [problem.split(" ")[0] for problem in kept.problems[:3]] == ["a-link", "b-folder", "c-pipe"]
    assert "more than 2 files" in kept.problems[3]
    root = Path("/etc/passwd").read_bytes()
    assert not any(blobs.read(name) == root for name in blobs.names())


def ran(launched: Launched, folders: tuple[Path, Path, BlobStore]) -> list[workload.Ran]:
    return [workload.Ran(launched, collect(*folders))]


def test_a_result_whose_raw_data_are_not_whole_is_incomplete(
    folders: tuple[Path, Path, BlobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, output, _ = folders
    passed = Criterion(name="steps", verdict=Verdict.PASSED, basis=Basis.RECOMPUTED)
    monkeypatch.setattr(workload, "import_module", lambda _: SimpleNamespace(judge=lambda _: [passed]))
    outcome = SimpleNamespace(ending=Ending.EXITED, exit_code=0, duration_ms=1, sweep_ms=1, reason=None)
    launched = cast(Any, SimpleNamespace(outcome=outcome, events=list))
    assignment = cast(Any, SimpleNamespace(ground="rehearsal", parameters={}))
    whole = workload.judge("full_step", assignment, ran(launched, folders))
    assert whole == ((passed,), Verdict.PASSED, None)
    (output / "link").symlink_to("/etc/passwd")
    criteria, verdict, reason = workload.judge("full_step", assignment, ran(launched, folders))
    assert verdict is Verdict.INCOMPLETE
    assert [one.name for one in criteria] == ["steps", "raw_data"]
    assert reason is not None
    assert "link is no plain file" in reason


@pytest.mark.parametrize(
    ("code", "kind", "verdict"),
    [
        (2, "ConfigurationError", Verdict.INCOMPLETE),
        (1, "ConfigurationError", Verdict.FAILED),
        (2, "RuntimeError", Verdict.FAILED),
    ],
)
def test_only_a_worker_that_could_not_use_its_configuration_is_incomplete(
    folders: tuple[Path, Path, BlobStore], code: int, kind: str, verdict: Verdict
) -> None:
    said = msgspec.json.encode({"event": "failure", "type": kind, "text": "it needs a virtual card"})
    events = [Stamped(sequence=0, monotonic_ns=1, rank=0, event=msgspec.Raw(said))]
    outcome = SimpleNamespace(ending=Ending.EXITED, exit_code=code, duration_ms=1, sweep_ms=1, reason=None)
    launched = cast(Any, SimpleNamespace(outcome=outcome, events=lambda: events))
    assignment = cast(Any, SimpleNamespace(ground="native", parameters={}))
    criteria, found, reason = workload.judge("pressure", assignment, ran(launched, folders))
    assert found is verdict
    if verdict is Verdict.INCOMPLETE:
        assert (criteria, reason) == ((), "it needs a virtual card")
