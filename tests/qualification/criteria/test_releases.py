"""Pressure, matched arms and a release beside another device pass only on what they must show."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qualification.criteria import device_release, pressure, release_vs_observe
from qualification.criteria.observation import Observation, Replay
from qualification.figures import Unreadable
from qualification.records import Criterion, Ground, Verdict
from qualification.verdict import fold
from tests.qualification.criteria.stamping import stamp

QUIET = Replay(True, 1000, 2000, 500, 0, 0, ("caller",))
TRIMMED = replace(QUIET, segments_freed=3)
DENIED = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
GRANTED = {"event": "release", "granted": True, "per_million": 50_000, "cost_ns": 40, "dearest_ns": 10, "work_ns": 1000}


def observed(workload: str, events: list[dict[str, Any]], replays: dict[str, Any], folder: Path) -> Observation:
    return Observation(
        workload=workload,
        ground=Ground.REHEARSAL,
        exit_code=0,
        timed_out=False,
        events=stamp([json.dumps(event) for event in events], folder),
        replays=replays,
    )


def criterion(criteria: list[Criterion], name: str) -> Criterion:
    (found,) = [each for each in criteria if each.name == name]
    return found


Make = Callable[..., list[Criterion]]


@pytest.fixture
def under_pressure(tmp_path: Path) -> Make:
    def make(*more: dict[str, Any], calls: str = "abc", replays: dict[str, Any] | None = None) -> list[Criterion]:
        events = [{"event": kind, "name": name} for name in calls for kind in ("call", "met")]
        events += [{"event": "headroom", "free": 9, "due": 9}, *more]
        found = {"pressure-a": TRIMMED, "step-0000": QUIET, "close": TRIMMED} if replays is None else replays
        return pressure.judge(observed("pressure", events, found, tmp_path))

    return make


def test_pressure_passes_when_every_call_was_met_with_releases_in_the_budget(under_pressure: Make) -> None:
    criteria = under_pressure({**GRANTED, "releases": 1})
    assert {each.name: each.reason for each in criteria if each.verdict is not Verdict.PASSED} == {}
    assert criterion(criteria, "segments_returned").measured == 3


def test_a_library_failure_is_the_recorded_cause(under_pressure: Make) -> None:
    criteria = under_pressure({"event": "failure", "type": "RuntimeError", "text": DENIED}, calls="")
    assert fold(criteria) is Verdict.FAILED
    assert DENIED in (criterion(criteria, "library_failures").reason or "")
    assert criterion(criteria, "library_calls_met").verdict is Verdict.INCOMPLETE


def test_a_run_that_released_nothing_has_shown_nothing(under_pressure: Make) -> None:
    criteria = under_pressure(replays={"pressure-a": QUIET, "close": TRIMMED})
    assert criterion(criteria, "segments_returned").verdict is Verdict.FAILED
    unreadable = under_pressure(replays={"pressure-a": Unreadable("is torn"), "step-0000": TRIMMED})
    assert criterion(unreadable, "segments_returned").verdict is Verdict.INCOMPLETE


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"releases": 1}, Verdict.PASSED),
        ({"releases": 1, "cost_ns": 41}, Verdict.FAILED),
        ({"releases": 0, "cost_ns": 41, "dearest_ns": None}, Verdict.PASSED),
        ({"releases": 1, "cost_ns": 41, "per_million": None}, Verdict.PASSED),
        ({"releases": 1, "work_ns": None}, Verdict.INCOMPLETE),
        ({"releases": 1, "dearest_ns": None}, Verdict.INCOMPLETE),
        ({"releases": None, "cost_ns": 41}, Verdict.FAILED),
    ],
)
def test_a_granted_release_is_weighed_again(under_pressure: Make, figures: dict[str, Any], verdict: Verdict) -> None:
    assert criterion(under_pressure({**GRANTED, **figures}), "releases_over_budget").verdict is verdict


@pytest.mark.parametrize(
    ("free", "due", "verdict"), [(8, 9, Verdict.FAILED), (9, 9, Verdict.PASSED), (9, None, Verdict.INCOMPLETE)]
)
def test_a_claim_that_was_not_free_fails(under_pressure: Make, free: int, due: int | None, verdict: Verdict) -> None:
    criteria = under_pressure({"event": "headroom", "free": free, "due": due})
    assert criterion(criteria, "claims_not_covered").verdict is verdict


def beside(folder: Path, *, other: int = 3, live: str = "1", place: int = 1, shrunk: int = 7) -> list[Criterion]:
    events = []
    for scope in ("process", "device"):
        events.append({"event": "before", "scope": scope, "place": [1, 0, 5], "live": ["1", "2"]})
        declared = {"virtual:0": 7, "virtual:1": shrunk if scope == "process" else 0}
        after = {"event": "after", "scope": scope, "place": [place, 0, 5], "live": [live, "2"], "shrunk": declared}
        events.append(after)
    replays = {
        "device-0/process": TRIMMED,
        "device-1/process": replace(TRIMMED, segments_freed=other),
        "device-0/device": TRIMMED,
        "device-1/device": QUIET,
    }
    return device_release.judge(observed("device_release", events, replays, folder))


def test_a_release_beside_another_device_is_declared_and_changes_nothing(tmp_path: Path) -> None:
    assert fold(beside(tmp_path)) is Verdict.PASSED
    for changed, name in (
        ({"live": "3"}, "live_values_changed"),
        ({"place": 0}, "places_changed"),
        ({"shrunk": 0}, "undeclared_effects"),
        ({"other": 0}, "process_other_returned"),
    ):
        assert criterion(beside(tmp_path, **changed), name).verdict is Verdict.FAILED  # type: ignore[arg-type]


def arms(folder: Path, *, state: int = 5, plan: int = 7, observed_freed: int = 0, outcome: str = "finished") -> Any:
    events: list[dict[str, Any]] = []
    for arm in ("observe", "release"):
        released = arm == "release"
        events += [
            {"event": "matched", "arm": arm, "state": {"free": state if released else 5}},
            {"event": "forecast", "arm": arm, "required": plan if released else 7},
            {"event": "release", "arm": arm, "why": "hand-off", "granted": True, "release_ns": 9 if released else 0},
            {"event": "outcome", "arm": arm, "kind": outcome if released else "failed"},
        ]
    replays = {"observe/step-0": replace(QUIET, segments_freed=observed_freed), "observe/close": TRIMMED}
    replays |= {"release/step-0": TRIMMED}
    return release_vs_observe.judge(observed("release_vs_observe", events, replays, folder))


def test_matched_arms_differ_in_the_release_alone(tmp_path: Path) -> None:
    assert fold(arms(tmp_path)) is Verdict.PASSED
    for changed, name in (
        ({"state": 6}, "states_differ"),
        ({"plan": 8}, "plans_differ"),
        ({"observed_freed": 1}, "observed_arm_returned"),
        ({"outcome": "failed"}, "released_arm_finished"),
    ):
        assert criterion(arms(tmp_path, **changed), name).verdict is Verdict.FAILED  # type: ignore[arg-type]
