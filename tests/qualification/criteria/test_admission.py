"""The admission workloads pass only when work was done, nothing ran out of memory, and failures are explained."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qualification.criteria import ballast, oversized
from qualification.criteria.observation import Observation, Replay
from qualification.figures import Unreadable
from qualification.records import Ground, Verdict
from tests.qualification.criteria.stamping import stamp

DONE = Replay(True, 900, 2000, 0, 0, 0, ("forward/0", "backward/subforward/1", "backward/subforward/0"))
FAILURE: dict[str, Any] = dict.fromkeys(oversized.EXPLAINED, 1) | {
    "sampled_before_unwinding": True,
    "requested": 600,
    "event": {"size": 600},
}


def _observation(workload: str, folder: Path, events: list[dict[str, Any]], **changes: Any) -> Observation:
    found = Observation(workload, Ground.REHEARSAL, 0, False, stamp([json.dumps(each) for each in events], folder))
    return replace(found, **changes)


def _oversized(folder: Path, failure: Any = FAILURE, **report: Any) -> Observation:
    path = folder / "a.report.json"
    trace = folder / "step-0001.trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"events": [["alloc", 0, 7, 0], ["oom", 3, 600, 0]]}).encode()))
    document = {
        "kind": "out_of_memory", "decision": {}, "caller_step": "forced", "observed": None, "failure": failure,
    } | report  # fmt: skip
    path.write_text(json.dumps(document))
    events: list[dict[str, Any]] = [
        {
            "event": "forecast",
            "step": 0,
            "subforwards": [list(range(10)), list(range(10, 19))],
            "bound_allocated": 1000,
        },
        {"event": "part", "name": "oversized", "allocated": 500, "before": 500},
    ]
    replays = {
        "step-0000": DONE,
        "step-0001": replace(DONE, out_of_memory=1),
        "step-0002": replace(DONE, stages=("backward/subforward/0",)),
        "close": DONE,
    }
    artifacts = {"reports/a.report.json": path, "step-0001.trace.json.gz": trace}
    return _observation("oversized", folder, events, replays=replays, artifacts=artifacts)


def _verdicts(criteria: list[Any]) -> dict[str, Verdict]:
    return {each.name: each.verdict for each in criteria if each.verdict is not Verdict.PASSED}


def test_an_explained_failure_after_a_smaller_plan_passes(tmp_path: Path) -> None:
    assert _verdicts(oversized.judge(_oversized(tmp_path))) == {}


@pytest.mark.parametrize("name", oversized.EXPLAINED)
def test_each_field_of_the_explanation_counts(tmp_path: Path, name: str) -> None:
    found = _verdicts(oversized.judge(_oversized(tmp_path, failure=FAILURE | {name: None})))
    assert found.pop("fields_missing_of_report") is Verdict.FAILED
    assert set(found.values()) <= {Verdict.INCOMPLETE}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"requested": 512, "event": {"size": 512}}, "failed_request_off_the_recorded_one"),
        ({"event": {"size": 512}}, "forecast_off_the_failed_request"),
    ],
)
def test_the_failed_request_is_the_recorded_and_the_forecast_one(
    tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    assert _verdicts(oversized.judge(_oversized(tmp_path, failure=FAILURE | change))) == {name: Verdict.FAILED}


def test_a_report_that_does_not_name_the_callers_step_fails(tmp_path: Path) -> None:
    observation = _oversized(tmp_path, caller_step=None)
    assert _verdicts(oversized.judge(observation)) == {"fields_missing_of_report": Verdict.FAILED}


def test_an_interrupted_run_that_claims_an_observation_fails(tmp_path: Path) -> None:
    observation = _oversized(tmp_path, observed={"peak_allocated": 1})
    assert _verdicts(oversized.judge(observation)) == {"fields_missing_of_report": Verdict.FAILED}


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("step-0000", {"out_of_memory": 1}, {"out_of_memory_in_smaller_plan": Verdict.FAILED}),
        ("step-0000", {"segments_freed": 1}, {"retries_in_smaller_plan": Verdict.FAILED}),
        ("step-0000", {"peak_allocated": 1001}, {"smaller_plan_above_bound": Verdict.FAILED}),
        ("step-0000", {"stages": ("backward/subforward/0",)}, {"subforwards": Verdict.FAILED}),
        ("step-0001", {"out_of_memory": 0}, {"out_of_memory_in_forced_plan": Verdict.FAILED}),
        ("step-0002", {"stages": ()}, {"backwards_after_failure": Verdict.FAILED}),
        ("close", {"allocated_after": 1}, {"allocated_after_close": Verdict.FAILED}),
    ],
)
def test_each_recording_can_fail(tmp_path: Path, name: str, change: dict[str, Any], expected: dict[str, Any]) -> None:
    observation = _oversized(tmp_path)
    found = replace(DONE, out_of_memory=int(name == "step-0001"))
    observation = replace(observation, replays={**observation.replays, name: replace(found, **change)})
    assert _verdicts(oversized.judge(observation)) == expected


def test_nothing_at_all_passes_nothing_but_the_exit_code(tmp_path: Path) -> None:
    for judge in (oversized.judge, ballast.judge):
        criteria = judge(_observation("any", tmp_path, []))
        passed = {each.name for each in criteria if each.verdict is Verdict.PASSED}
        assert passed == {"exit_code"}


def _ballast(
    folder: Path, answers: list[str], replays: dict[str, Any], size: int = ballast.BALLAST
) -> dict[str, Verdict]:
    events = [{"event": "ballast", "level": level, "size": size} for level in range(len(answers))]
    events += [{"event": "answer", "answer": answer} for answer in answers if answer]
    return _verdicts(ballast.judge(_observation("ballast", folder, events, replays=replays)))


def test_cold_admissions_are_fitted_or_refused_and_nothing_else(tmp_path: Path) -> None:
    steps = {"level-0/step-0000": DONE}
    assert _ballast(tmp_path, ["fitted 7 rows", "AdmissionRefused"], steps) == {}
    assert _ballast(tmp_path, ["fitted 7 rows", "AdmissionRefused"], steps, size=1) == {
        "batches_without_the_reported_ballast": Verdict.FAILED
    }
    died = _ballast(tmp_path, ["fitted 7 rows", "AdmissionRefused", "OutOfMemoryError"], steps)
    assert died == {"answers_that_are_failures": Verdict.FAILED}
    silent = _ballast(tmp_path, ["fitted 7 rows", "AdmissionRefused", ""], steps)
    assert silent == {"batches_unanswered": Verdict.FAILED}
    hit = {"level-0/step-0000": replace(DONE, out_of_memory=1)}
    assert _ballast(tmp_path, ["fitted 7 rows", "AdmissionRefused"], hit) == {
        "batches_fitted": Verdict.FAILED,
        "out_of_memory_events": Verdict.FAILED,
    }
    torn = {"level-0/step-0000": Unreadable("cannot be replayed")}
    assert _ballast(tmp_path, ["fitted 7 rows", "AdmissionRefused"], torn) == {
        "batches_fitted": Verdict.INCOMPLETE,
        "out_of_memory_events": Verdict.INCOMPLETE,
    }
