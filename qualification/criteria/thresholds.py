"""Thresholds that several workloads share: how the worker ended, how much was done, and what must not happen at all."""

from __future__ import annotations

import msgspec

from qualification.criteria.observation import Observation
from qualification.figures import Unreadable
from qualification.records import Basis, Criterion, Verdict
from qualification.verdict import Direction, Threshold, compare

Measured = int | str | Unreadable


def ended(observation: Observation, name: str = "exit_code") -> Criterion:
    """Judge the worker's exit code."""
    threshold = Threshold(name=name, direction=Direction.EQUAL, value=0, unit="code")
    reason = "the worker ran out of time" if observation.timed_out else None
    return compare(threshold, observation.exit_code, Basis.MEASURED, reason)


def left_after_close(observation: Observation, folder: str = "") -> Measured:
    """Return the bytes that were allocated once all was closed, by the replay of that recording in ``folder``."""
    found = observation.replays.get(f"{folder}close", Unreadable("is missing"))
    if isinstance(found, Unreadable):
        return Unreadable(f"is unknown: recording {folder}close {found.reason}")
    return found.allocated_after


def malformed(observation: Observation) -> Criterion | None:
    """Return an INCOMPLETE criterion that names the first event which cannot be read as it was sent, or None."""
    flaws = ((event, event.flaw()) for event in observation.events)
    flawed = [(event, flaw) for event, flaw in flaws if flaw]
    if not flawed:
        return None
    event, flaw = flawed[0]
    criterion = count("malformed_events", 0, len(flawed), "events")
    words = f"{criterion.reason}; event {event.sequence} ({event.kind or 'of no kind'}) {flaw}"
    return msgspec.structs.replace(criterion, basis=Basis.MEASURED, reason=words)


def count(name: str, value: int, measured: Measured, unit: str) -> Criterion:
    """Judge a count of work: too little done says nothing, so it is INCOMPLETE."""
    short = Verdict.INCOMPLETE
    return compare(Threshold(name=name, direction=Direction.EQUAL, value=value, unit=unit, shortfall=short), measured)


def exactly(name: str, value: int, measured: Measured, unit: str) -> Criterion:
    """Judge a count that must be neither lower nor higher."""
    return compare(Threshold(name=name, direction=Direction.EQUAL, value=value, unit=unit), measured)


def none(name: str, measured: Measured, unit: str, reason: str | None = None) -> Criterion:
    """Judge what must not happen; ``reason`` says more about what did."""
    threshold = Threshold(name=name, direction=Direction.AT_MOST, value=0, unit=unit, plausible_from=0)
    return compare(threshold, measured, reason=reason)


def some(name: str, measured: Measured, unit: str) -> Criterion:
    """Judge what must happen at least once."""
    return compare(Threshold(name=name, direction=Direction.AT_LEAST, value=1, unit=unit), measured)
