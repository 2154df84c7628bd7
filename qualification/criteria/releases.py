"""What the events and recordings of a run say about cache releases, their budget, and the memory of libraries."""

from __future__ import annotations

from collections.abc import Callable

from qualification.criteria.observation import Observation, Replay, StampedEvent
from qualification.criteria.thresholds import none
from qualification.figures import Unreadable
from qualification.records import Criterion

MILLION = 1_000_000
_LIBRARY_WORDS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "Failed to CUDA malloc")


def library_failures(observation: Observation) -> Criterion:
    """Judge how often a library could not allocate; its own words become the reason."""
    words = [str(event.text("text")) for event in observation.of("failure")]
    failed = [text for text in words if any(word in text for word in _LIBRARY_WORDS)]
    return none("library_failures", len(failed), "failures", failed[0][:300] if failed else None)


def total(observation: Observation, part: Callable[[Replay], int], under: str = "") -> int | Unreadable:
    """Add up a figure over the recordings whose names begin with ``under``; every one must be readable.

    The recording of the close does not count: there everything is given back.
    """
    found = {name: each for name, each in observation.replays.items() if name.startswith(under) and name != "close"}
    for name, each in found.items():
        if isinstance(each, Unreadable):
            return Unreadable(f"is unknown: recording {name} {each.reason}")
    known = [each for each in found.values() if isinstance(each, Replay)]
    return sum(map(part, known)) if known else Unreadable("is unknown: nothing was recorded")


def claims_not_covered(observation: Observation) -> int | Unreadable:
    """Count how often less was free than was claimed for libraries, right before a phase that may need it."""
    missing = 0
    for event in observation.of("headroom"):
        free, due = event.whole("free"), event.whole("due")
        if isinstance(free, Unreadable) or isinstance(due, Unreadable):
            return Unreadable(f"is unknown: event {event.sequence} lacks what is free or due")
        missing += free < due
    return missing


def over_budget(observation: Observation) -> int | Unreadable:
    """Count the releases that were granted although cost and dearest episode exceeded their share of the work.

    The first release of a run is free, and a policy without a budget has none to exceed.
    """
    over = 0
    for event in observation.of("release"):
        if not isinstance(event.body, Unreadable) and event.body.get("granted") is True and _limited(event):
            figures = [event.whole(name) for name in ("cost_ns", "dearest_ns", "work_ns", "per_million")]
            known = [figure for figure in figures if not isinstance(figure, Unreadable)]
            if len(known) < len(figures):
                return Unreadable(f"is unknown: event {event.sequence} lacks a figure of the account")
            cost, dearest, work, share = known
            over += (cost + dearest) * MILLION > share * work
    return over


def _limited(event: StampedEvent) -> bool:
    assert not isinstance(event.body, Unreadable)
    return event.body.get("per_million") is not None and event.whole("releases") != 0
