"""Judge a pressure run: every library got its memory, and the room for it came from releases that were needed.

What was returned to the driver rests on the replay of recordings, order and calls on the launcher's stamps.
"""

from __future__ import annotations

from qualification.criteria.observation import Observation
from qualification.criteria.releases import claims_not_covered, library_failures, over_budget, total
from qualification.criteria.thresholds import count, ended, none, some
from qualification.records import Criterion

CALLS = ("a", "b", "c")
"""The backward, the reduction, and the reduction on a communicator that was rebuilt."""


def judge(observation: Observation) -> list[Criterion]:
    """Return every criterion of the workload, in the order in which people read them."""
    return [
        ended(observation),
        library_failures(observation),
        count("library_calls_met", len(CALLS), _met(observation), "calls"),
        some("segments_returned", total(observation, lambda replay: replay.segments_freed), "segments"),
        none("claims_not_covered", claims_not_covered(observation), "claims"),
        none("releases_over_budget", over_budget(observation), "releases"),
        none("recordings_not_exact", total(observation, lambda replay: int(not replay.exact)), "recordings"),
        none("out_of_memory_events", total(observation, lambda replay: replay.out_of_memory), "events"),
    ]


def _met(observation: Observation) -> int:
    """Count the calls that were begun and met, in this order."""
    names = [event.text("name") for event in observation.events if event.kind in ("call", "met")]
    kinds = [event.kind for event in observation.events if event.kind in ("call", "met")]
    pairs = list(zip(kinds, names, strict=True))
    return sum(("call", name) in pairs and ("met", name) in pairs for name in CALLS)
