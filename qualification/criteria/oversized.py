"""Judge an oversized run: the smaller plan did all of the work, and the forced failure is fully explained.

The plan and its peaks rest on replayed recordings, the explanation on the planner report that was hashed with them; the
request that failed is compared with the one in the recording.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping

from qualification.criteria.observation import Observation, Replay
from qualification.criteria.thresholds import Measured, count, ended, left_after_close, none, some
from qualification.figures import Unreadable, read_object
from qualification.records import Criterion
from qualification.verdict import Direction, Threshold, compare

REQUESTS = 19
SMALLER, FORCED, AFTER = "step-0000", "step-0001", "step-0002"
EXPLAINED = (
    "stage", "part", "subforward", "requests", "slot", "slot_steps", "asked", "requested", "position", "stream",
    "event", "free", "allocated", "reserved", "before", "after", "partial_peak_allocated", "partial_peak_reserved",
)  # fmt: skip
"""What a report of a failure must hold."""


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    report = _report(observation)
    failure = _failure(report)
    requested = _figure(failure, "requested")
    return [
        ended(observation),
        _subforwards(observation),
        count("requests_run", REQUESTS, _requests(observation), "requests"),
        none("out_of_memory_in_smaller_plan", _of(observation, SMALLER, lambda found: found.out_of_memory), "events"),
        none("retries_in_smaller_plan", _of(observation, SMALLER, lambda found: found.segments_freed), "segments"),
        none("smaller_plan_above_bound", _above(observation), "B"),
        some("out_of_memory_in_forced_plan", _of(observation, FORCED, lambda found: found.out_of_memory), "events"),
        none("fields_missing_of_report", _missing(report), "fields"),
        none("failed_request_off_the_recorded_one", _off(requested, _recorded(observation)), "B"),
        none("forecast_off_the_failed_request", _off(_forecast(failure), requested), "B"),
        none("left_by_failed_plan", _left(observation), "B"),
        some("backwards_after_failure", _of(observation, AFTER, _backwards), "backwards"),
        none("allocated_after_close", left_after_close(observation), "B"),
    ]


def _subforwards(observation: Observation) -> Criterion:
    threshold = Threshold(name="subforwards", direction=Direction.AT_LEAST, value=2, unit="subforwards")
    return compare(threshold, _of(observation, SMALLER, _backwards))


def _backwards(found: Replay) -> int:
    return len({stage for stage in found.stages if stage.startswith("backward/subforward/")})


def _of(observation: Observation, name: str, part: object) -> Measured:
    found = observation.replays.get(name, Unreadable("is missing"))
    if isinstance(found, Unreadable):
        return Unreadable(f"is unknown: recording {name} {found.reason}")
    assert callable(part)
    return int(part(found))


def _requests(observation: Observation) -> Measured:
    for event in observation.of("forecast"):
        if event.whole("step") == 0 and not isinstance(event.body, Unreadable):
            cuts = event.body.get("subforwards")
            if isinstance(cuts, list) and all(isinstance(cut, list) for cut in cuts):
                return len({index for cut in cuts for index in cut if type(index) is int})
    return Unreadable("is unknown: no forecast of step 0 names its requests")


def _above(observation: Observation) -> Measured:
    for event in observation.of("forecast"):
        if event.whole("step") == 0:
            bound = event.whole("bound_allocated")
            peak = _of(observation, SMALLER, lambda found: found.peak_allocated)
            if isinstance(bound, Unreadable):
                return Unreadable(f"is unknown: bound_allocated {bound.reason}")
            return max(0, peak - bound) if isinstance(peak, int) else peak
    return Unreadable("is unknown: step 0 has no forecast")


def _report(observation: Observation) -> Mapping[str, object] | Unreadable:
    for name, path in sorted(observation.artifacts.items()):
        if name.startswith("reports/") and name.endswith(".report.json"):
            document = read_object(path.read_bytes())
            if not isinstance(document, Unreadable) and document.get("kind") == "out_of_memory":
                return document
    return Unreadable("is unknown: there is no report of an out of memory")


def _missing(report: Mapping[str, object] | Unreadable) -> Measured:
    """Count what the report lacks; a peak of an interrupted run must not claim to be an observation."""
    if isinstance(report, Unreadable):
        return report
    failure = report.get("failure")
    if not isinstance(failure, Mapping):
        return len(EXPLAINED)
    lacking = sum(failure.get(name) is None for name in EXPLAINED)
    early = failure.get("sampled_before_unwinding") is not True
    unnamed = report.get("decision") is None, report.get("caller_step") is None
    return lacking + early + (report.get("observed") is not None) + sum(unnamed)


def _failure(report: Mapping[str, object] | Unreadable) -> Mapping[str, object] | Unreadable:
    """Return what the report says of the failure."""
    return report if isinstance(report, Unreadable) else _within(report, "failure")


def _within(document: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def _figure(place: Mapping[str, object] | Unreadable, name: str) -> int | Unreadable:
    """Return a whole number that the report says there."""
    if isinstance(place, Unreadable):
        return place
    found = place.get(name)
    return found if type(found) is int else Unreadable(f"is unknown: the report's {name} is no whole number")


def _forecast(failure: Mapping[str, object] | Unreadable) -> int | Unreadable:
    """Return the size that the tapes have for the allocation that failed."""
    return _figure(failure if isinstance(failure, Unreadable) else _within(failure, "event"), "size")


def _recorded(observation: Observation) -> int | Unreadable:
    """Return the request that ran out of memory in the recording of the forced plan, bytes."""
    path = observation.artifacts.get(f"{FORCED}.trace.json.gz")
    if path is None:
        return Unreadable("is unknown: the forced plan was not recorded")
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["events"]
        sizes = [size for action, _, size, _ in events if action == "oom"]
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        return Unreadable(f"is unknown: the recording of the forced plan cannot be read: {error}")
    return sizes[-1] if sizes and type(sizes[-1]) is int else Unreadable("is unknown: no request failed there")


def _off(found: int | Unreadable, expected: int | Unreadable) -> Measured:
    if isinstance(found, Unreadable):
        return found
    return expected if isinstance(expected, Unreadable) else abs(found - expected)


def _left(observation: Observation) -> Measured:
    for event in observation.of("part"):
        if event.text("name") == "oversized":
            allocated, before = event.whole("allocated"), event.whole("before")
            if isinstance(allocated, int) and isinstance(before, int):
                return max(0, allocated - before)
    return Unreadable("is unknown: the forced plan was not run")
