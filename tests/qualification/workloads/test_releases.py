"""The release workloads, run whole by the worker in a process of its own and judged from what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from qualification.criteria.observation import Observation
from qualification.execution.worker import Job
from qualification.records import Criterion, Ground, Verdict
from qualification.verdict import fold
from qualification.workloads.recompute import replays
from tests.qualification.criteria.stamping import stamp

ROOT = Path(__file__).parents[3]
SMALLER = {"shortest": 1400, "longest": 1500}
"""Tokens with which a step in single precision still allocates more than is left free."""


def qualify(workload: str, policy: str, folder: Path, **parameters: int) -> list[Criterion]:
    output = folder / "out"
    job = Job(
        run="run-of-a-test",
        attempt=1,
        workload=workload,
        ground=Ground.REHEARSAL,
        policy=policy,
        subject=str(ROOT),
        output=str(output),
        parameters=parameters,
    )
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "qualification.execution.worker", str(folder / "job.json")],
        env=os.environ | {"QUALIFY_EVENTS_FD": str(writing), "OMP_NUM_THREADS": "1"},
        pass_fds=[writing],
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as worker:
        os.close(writing)
        with os.fdopen(reading) as lines:
            events = stamp(lines.read().splitlines(), folder)
    files = {str(path.relative_to(output)): path for path in output.rglob("*") if path.is_file()}
    observation = Observation(
        workload=workload,
        ground=Ground.REHEARSAL,
        exit_code=worker.returncode,
        timed_out=False,
        events=events,
        artifacts=files,
        replays=replays(files),
    )
    criteria: list[Criterion] = import_module(f"qualification.criteria.{workload}").judge(observation)
    return criteria


def test_without_releases_the_library_fails_and_is_the_recorded_cause(tmp_path: Path) -> None:
    criteria = qualify("pressure", "none", tmp_path, **SMALLER)
    assert fold(criteria) is Verdict.FAILED
    (failure,) = [each for each in criteria if each.name == "library_failures"]
    assert failure.measured == 1
    assert "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`" in (failure.reason or "")


@pytest.mark.parametrize("policy", ["unconditional", "budgeted", "forecast"])
def test_a_policy_that_releases_passes_under_the_same_pressure(policy: str, tmp_path: Path) -> None:
    criteria = qualify("pressure", policy, tmp_path, **SMALLER)
    assert {each.name: each.reason for each in criteria if each.verdict is not Verdict.PASSED} == {}


def test_arms_match_until_the_release(tmp_path: Path) -> None:
    criteria = qualify("release_vs_observe", "unconditional", tmp_path, **SMALLER)
    assert {each.name: each.reason for each in criteria if each.verdict is not Verdict.PASSED} == {}


def test_two_devices_in_one_process(tmp_path: Path) -> None:
    criteria = qualify("device_release", "none", tmp_path)
    assert {each.name: each.reason for each in criteria if each.verdict is not Verdict.PASSED} == {}
