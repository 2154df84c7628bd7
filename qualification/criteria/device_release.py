"""Judge a device release: which caches shrank is what was declared, and nothing else changed.

What each device returned rests on the replay of its recording.
"""

from __future__ import annotations

from collections.abc import Mapping

from qualification.criteria.observation import Observation
from qualification.criteria.releases import total
from qualification.criteria.thresholds import Measured, count, ended, none, some
from qualification.figures import Unreadable
from qualification.records import Criterion

SCOPES = ("process", "device")


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    returned = {
        (scope, index): total(observation, lambda replay: replay.segments_freed, f"device-{index}/{scope}")
        for scope in SCOPES
        for index in (0, 1)
    }
    return [
        ended(observation),
        count("releases", len(SCOPES), len(observation.of("after")), "releases"),
        some("process_selected_returned", returned["process", 0], "segments"),
        some("process_other_returned", returned["process", 1], "segments"),
        some("device_selected_returned", returned["device", 0], "segments"),
        none("device_other_returned", returned["device", 1], "segments"),
        none("undeclared_effects", _undeclared(observation, returned), "devices"),
        none("live_values_changed", _changed(observation, "live"), "releases"),
        none("places_changed", _changed(observation, "place"), "releases"),
        none("recordings_not_exact", total(observation, lambda replay: int(not replay.exact), "device-"), "recordings"),
    ]


def _changed(observation: Observation, what: str) -> Measured:
    """Count the releases around which ``what`` differs."""
    pairs = list(zip(observation.of("before"), observation.of("after"), strict=False))
    seen = [(_part(before.body, what), _part(after.body, what)) for before, after in pairs]
    if len(seen) < len(SCOPES) or any(not isinstance(each, list) or not each for pair in seen for each in pair):
        return Unreadable(f"are unknown: {what} is missing before or after a release")
    return sum(before != after for before, after in seen)


def _undeclared(observation: Observation, returned: Mapping[tuple[str, int], int | Unreadable]) -> Measured:
    """Count the devices whose cache shrank although the release declared nothing for them, or the other way round."""
    wrong = 0
    for event in observation.of("after"):
        shrunk = _part(event.body, "shrunk")
        if not isinstance(shrunk, dict) or len(shrunk) != 2:
            return Unreadable(f"are unknown: event {event.sequence} declares no two devices")
        for index, size in enumerate(dict(sorted(shrunk.items())).values()):
            segments = returned.get((event.text("scope") or "", index), Unreadable("was not recorded"))
            if isinstance(segments, Unreadable):
                return segments
            wrong += (segments > 0) != (type(size) is int and size > 0)
    return wrong


def _part(body: Mapping[str, object] | Unreadable, key: str) -> object:
    return None if isinstance(body, Unreadable) else body.get(key)
