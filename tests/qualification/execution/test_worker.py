"""The worker loads trainer_rank from the subject alone, speaks one contract version, and reports how it ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from qualification.criteria.observation import StampedEvent, understood
from qualification.execution.launch import launch
from qualification.execution.supervision import Ending
from qualification.execution.worker import CONTRACT_VERSION

ROOT = Path(__file__).resolve().parents[3]


def _job(folder: Path, subject: Path, **changes: object) -> Path:
    job = {
        "run": "r1",
        "attempt": 0,
        "workload": "full_step",
        "ground": "rehearsal",
        "policy": "forecast",
        "subject": str(subject),
        "output": str(folder / "output"),
    }
    path = folder / "job.json"
    path.write_bytes(msgspec.json.encode(job | changes))
    return path


def _subject(folder: Path, contract: str | None) -> Path:
    package = folder / "subject" / "trainer_rank"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if contract is not None:
        (package / "contract.py").write_text(contract)
    return package.parent


def _run(job: Path) -> tuple[int, str, list[dict[str, object]]]:
    reading, writing = os.pipe()
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "QUALIFY_EVENTS_FD": str(writing)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "qualification.execution.worker", str(job)],
        check=False, env=environment, pass_fds=(writing,), capture_output=True, text=True, timeout=60, cwd=job.parent,
    )  # fmt: skip
    os.close(writing)
    with os.fdopen(reading) as stream:
        events = [json.loads(line) for line in stream]
    return done.returncode, done.stderr, events


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (None, "no module trainer_rank.contract"),
        ("CONTRACT_VERSION = 99", f"speaks contract version 99; this pipeline speaks {CONTRACT_VERSION}"),
        ("", "speaks contract version None"),
        ("import nowhere_to_be_found", "no module nowhere_to_be_found"),
    ],
)
def test_a_subject_that_does_not_speak_the_contract_is_refused_by_name(
    tmp_path: Path, contract: str | None, message: str
) -> None:
    code, stderr, events = _run(_job(tmp_path, _subject(tmp_path, contract)))
    (event,) = events
    assert (code, event["event"], event["type"]) == (2, "failure", "ConfigurationError")
    assert message in str(event["text"])
    assert message in stderr
    assert len(stderr.splitlines()) == 1


def test_nothing_of_trainer_rank_comes_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, stderr, _ = _run(_job(tmp_path, tmp_path / "empty"))
    assert code == 2
    assert f"{ROOT / 'trainer_rank' / 'contract.py'} would be used instead" in stderr


@pytest.mark.parametrize("workload", ["no_such_workload", "../full_step", "os"])
def test_an_unknown_workload_is_refused_by_name(tmp_path: Path, workload: str) -> None:
    subject = _subject(tmp_path, f"CONTRACT_VERSION = {CONTRACT_VERSION}")
    code, stderr, _ = _run(_job(tmp_path, subject, workload=workload))
    assert code == 2
    assert f"workload {workload!r} does not exist" in stderr


def test_a_job_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"run": "r1"}')
    code, stderr, _ = _run(path)
    assert code == 2
    assert "missing required field" in stderr


def test_a_failure_of_the_subject_is_an_event_and_an_exit_code(tmp_path: Path) -> None:
    contract = f"CONTRACT_VERSION = {CONTRACT_VERSION}\ndef construct(**_):\n    raise RuntimeError('broken head')"
    code, stderr, events = _run(_job(tmp_path, _subject(tmp_path, contract)))
    assert code == 1
    assert [event["event"] for event in events] == ["start", "failure"]
    assert (events[1]["type"], events[1]["text"]) == ("RuntimeError", "broken head")
    assert "broken head" in stderr


def test_the_launcher_stamps_what_the_worker_says(tmp_path: Path) -> None:
    contract = f"CONTRACT_VERSION = {CONTRACT_VERSION}\ndef construct(**_):\n    raise SystemExit(3)"
    job = _job(tmp_path, _subject(tmp_path, contract))
    launched = launch(job, run="r1", token="0" * 32, folder=tmp_path / "attempt")
    events: tuple[StampedEvent, ...] = understood(launched.events())
    assert [event.kind for event in events] == ["start", "failure"]
    assert [event.sequence for event in events] == [0, 1]
    assert events[0].monotonic_ns <= events[1].monotonic_ns
    assert (launched.outcome.ending, launched.outcome.exit_code) == (Ending.EXITED, 3)
