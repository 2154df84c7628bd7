"""Step time is judged from the launcher's stamps, and only if both arms did the same work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qualification.criteria.observation import Observation, StampedEvent
from qualification.criteria.throughput import judge
from qualification.records import Criterion, Ground, Verdict
from qualification.statistics import interleaved
from qualification.verdict import fold

Body = dict[str, Any]
MILLISECOND = 1_000_000


def bodies(pairs: int = 5) -> list[Body]:
    """The events of a run whose arms did the same work."""
    warm = [{"event": "warm", "arm": arm, "log_probabilities": [[-5.5, -5.25]]} for arm in "AB"]
    measured = [
        {"event": kind, "number": number, "arm": arm, "log_probabilities": [[-5.125, -5.0]]}
        for number, arm in enumerate(interleaved(pairs))
        for kind in ("measure", "measured")
    ]
    return [*warm, *measured]


def judged(listed: list[Body], ratio: float = 1.0) -> dict[str, Criterion]:
    """Stamp the events so that a measurement of A takes 100 ms and one of B ``ratio`` times as long."""
    events, clock = [], 0
    for sequence, body in enumerate(listed):
        if body["event"] == "measured":
            clock += int(100 * MILLISECOND * (ratio if body["arm"] == "B" else 1) + sequence * 1000)
        events.append(StampedEvent(sequence, clock, 0, body))
    observation = Observation("throughput", Ground.REHEARSAL, 0, False, tuple(events))
    return {criterion.name: criterion for criterion in judge(observation)}


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (1.0, Verdict.PASSED),
        (1.04, Verdict.PASSED),
        (1.2, Verdict.FAILED),
        (0.6, Verdict.PASSED),
        (0.025, Verdict.INCONCLUSIVE),
    ],
)
def test_the_ratio_of_step_times_is_judged_from_stamps(ratio: float, verdict: Verdict) -> None:
    found = judged(bodies(), ratio)
    assert found["step_time_ratio"].verdict is verdict
    assert abs(float(str(found["step_time_ratio"].measured)) - ratio) < 0.01
    assert fold(found.values()) is verdict


def other_work(listed: list[Body]) -> None:
    listed[-1]["log_probabilities"] = [[-5.125, -5.01]]


def less_work(listed: list[Body]) -> None:
    listed[-1]["log_probabilities"] = [[-5.125]]


def no_number(listed: list[Body]) -> None:
    listed[-1]["log_probabilities"] = [[float("nan"), -5.0]]


def no_work(listed: list[Body]) -> None:
    for body in listed:
        body["log_probabilities"] = []


def unknown_arm(listed: list[Body]) -> None:
    listed[-1]["arm"] = "C"


def one_end_missing(listed: list[Body]) -> None:
    del listed[-1]


def wrong_order(listed: list[Body]) -> None:
    listed[2:4], listed[4:6] = listed[4:6], listed[2:4]


def too_few_pairs(listed: list[Body]) -> None:
    listed[:] = bodies(3)


@pytest.mark.parametrize(
    ("change", "criterion", "verdict"),
    [
        (other_work, "work_differs", Verdict.FAILED),
        (less_work, "work_differs", Verdict.FAILED),
        (no_number, "work_differs", Verdict.INCOMPLETE),
        (no_work, "work_differs", Verdict.INCOMPLETE),
        (unknown_arm, "work_differs", Verdict.INCOMPLETE),
        (one_end_missing, "measurements", Verdict.INCOMPLETE),
        (wrong_order, "step_time_ratio", Verdict.INCOMPLETE),
        (too_few_pairs, "measurements", Verdict.INCOMPLETE),
        (too_few_pairs, "step_time_ratio", Verdict.INCOMPLETE),
    ],
)
def test_what_was_not_measured_or_was_other_work_never_passes(
    change: Callable[[list[Body]], None], criterion: str, verdict: Verdict
) -> None:
    listed = bodies()
    change(listed)
    found = judged(listed)
    assert found[criterion].verdict is verdict
    assert fold(found.values()) is not Verdict.PASSED


def test_a_run_without_events_is_incomplete() -> None:
    assert fold(judged([]).values()) is Verdict.INCOMPLETE
