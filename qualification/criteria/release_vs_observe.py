"""Judge two matched arms: equal until the first decision on a release, different only in whether it was made.

What each arm returned to the driver rests on the replay of its recordings.
"""

from __future__ import annotations

from qualification.criteria.observation import Observation, StampedEvent
from qualification.criteria.releases import total
from qualification.criteria.thresholds import Measured, count, ended, none, some
from qualification.figures import Unreadable
from qualification.records import Criterion

OBSERVE, RELEASE = "observe", "release"
_TIMES = ("cost_ns", "dearest_ns", "work_ns", "charged_ns", "release_ns", "refill_ns_per_segment")


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    outcomes = {event.text("arm"): event.text("kind") for event in observation.of("outcome")}
    return [
        ended(observation),
        count("outcomes_recorded", 2, len(outcomes), "arms"),
        none("states_differ", _states_differ(observation), "arms"),
        none("plans_differ", _plans_differ(observation), "events"),
        count("arms_that_decided", 2, sum(bool(_decisions(observation, arm)) for arm in (OBSERVE, RELEASE)), "arms"),
        none("observed_arm_returned", _returned(observation, OBSERVE), "segments"),
        some("released_arm_returned", _returned(observation, RELEASE), "segments"),
        some("released_arm_finished", int(outcomes.get(RELEASE) == "finished"), "arms"),
    ]


def _states_differ(observation: Observation) -> Measured:
    states = [event.body.get("state") for event in observation.of("matched") if not isinstance(event.body, Unreadable)]
    if len(states) != 2 or not all(isinstance(state, dict) and state for state in states):
        return Unreadable("is unknown: an arm reported no state")
    return int(states[0] != states[1])


def _plans_differ(observation: Observation) -> Measured:
    """Count what differs between the arms' events from the matched state to the first decision on a release."""
    first, second = (_before_decision(observation, arm) for arm in (OBSERVE, RELEASE))
    if isinstance(first, Unreadable) or isinstance(second, Unreadable):
        return Unreadable("is unknown: an arm decided on no release")
    return sum(one != other for one, other in zip(first, second, strict=False)) + abs(len(first) - len(second))


def _before_decision(observation: Observation, arm: str) -> list[dict[str, object]] | Unreadable:
    found: list[dict[str, object]] = []
    for event in _after_match(observation, arm):
        if isinstance(event.body, Unreadable):
            return event.body
        found.append({key: value for key, value in event.body.items() if key not in ("arm", *_TIMES)})
        if event.kind == "release":
            decided = ("why", "granted", "reason", "releases")
            found[-1] = {key: event.body.get(key) for key in decided}
            return found
    return Unreadable("decided on no release")


def _after_match(observation: Observation, arm: str) -> list[StampedEvent]:
    matched = [event.sequence for event in observation.of("matched") if event.text("arm") == arm]
    return [each for each in observation.events if each.text("arm") == arm and matched and each.sequence > matched[0]]


def _decisions(observation: Observation, arm: str) -> list[StampedEvent]:
    return [event for event in _after_match(observation, arm) if event.kind == "release"]


def _returned(observation: Observation, arm: str) -> Measured:
    """Add up the segments that an arm returned; not those of its close, where everything is given back."""
    names = [name for name in observation.replays if name.startswith(f"{arm}/") and name != f"{arm}/close"]
    parts = [total(observation, lambda replay: replay.segments_freed, name) for name in names]
    known = [part for part in parts if not isinstance(part, Unreadable)]
    return sum(known) if known and len(known) == len(parts) else Unreadable(f"is unknown: arm {arm} is not recorded")
