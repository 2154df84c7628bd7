"""The workload resume as the pipeline runs it: two supervised processes, each swept and hashed, and a clean receipt."""

from __future__ import annotations

from pathlib import Path

from flows.workload import process_folders, run_workload
from qualification.assignment import Assignment
from qualification.evidence.blobs import BlobStore
from qualification.execution.attempt import Attempt
from qualification.execution.supervision import Command, Limits
from qualification.providers.protocol import Place, ProcessProvider
from qualification.records import Ground, Policy, ReceiptStatus, Verdict
from tests.facts import STAMP, subject

ROOT = Path(__file__).parents[2]


class Watched(ProcessProvider):
    """Remembers what each command may read and write."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def command(self, command: Command, place: Place) -> Command:
        self.places.append(place)
        return super().command(command, place)


def test_a_fresh_process_continues_what_another_published(tmp_path: Path) -> None:
    provider = Watched()
    assignment = Assignment(
        run="run-of-a-test",
        attempt=1,
        started_at=STAMP,
        subject=subject(),
        policy=Policy(name="none", sha256="0" * 64),
        ground=Ground.REHEARSAL,
        workloads=("resume",),
        rules_sha256="0" * 64,
        environment_sha256="0" * 64,
        source=str(ROOT),
        parameters={"requests": 2, "shortest": 8, "longest": 16},
    )
    attempt = Attempt("run-of-a-test", 1, tmp_path / "attempt", trainer=True, recorded=False, provider=provider)
    attempt.begin()
    found = run_workload("resume", assignment, attempt, BlobStore(tmp_path / "blobs"), limits=Limits(wall_seconds=120))
    receipt = attempt.take_receipt()
    assert {one.name: one.reason for one in found.criteria if one.verdict is not Verdict.PASSED} == {}
    assert found.verdict is Verdict.PASSED
    names = {artifact.name for artifact in found.artifacts}
    assert {"publish/v1/manifest.json", "continue/loaded/manifest.json", "continue/v2/manifest.json"} <= names
    assert {"launcher:publish/events.jsonl", "launcher:continue/events.jsonl"} <= names
    assert receipt.status is ReceiptStatus.CLEAN, receipt.reason
    publisher, continuing = provider.places
    published = str(process_folders(attempt.folder, "resume")["publish"][1])
    assert published in publisher.writes
    assert published in continuing.reads and published not in continuing.writes
    assert len(process_folders(attempt.folder, "resume")) == len(attempt.folders) == 2
