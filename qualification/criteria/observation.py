"""What a judge gets to see of a workload: what trusted code stamped, measured, hashed or recomputed.

A worker's line is kept as the text it sent. It is read here, strictly and figure by figure, so that one bad value makes
one criterion INCOMPLETE and never takes the others with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from qualification.execution.capture import Stamped
from qualification.figures import Unreadable, read_figure, read_object
from qualification.records import Figure, Ground


@dataclass(frozen=True)
class StampedEvent:
    """One line of the worker as the launcher received it.

    ``sequence`` counts received lines of all ranks from 0; ``monotonic_ns`` is the launcher's clock; ``body`` is what
    the worker said, ``Unreadable`` when the line is no JSON object.
    """

    sequence: int
    monotonic_ns: int
    rank: int
    body: Mapping[str, object] | Unreadable

    @property
    def kind(self) -> str | None:
        """The worker's name for the event, or None when it has no readable one."""
        return self.text("event")

    def text(self, key: str) -> str | None:
        """Return the text under a key, or None when there is none."""
        found = None if isinstance(self.body, Unreadable) else self.body.get(key)
        return found if isinstance(found, str) else None

    def figure(self, *path: str) -> int | str | Unreadable:
        """Return the number at a path of keys; anything but a finite number is ``Unreadable``."""
        found: object = self.body
        for key in path:
            if isinstance(found, Unreadable):
                return found
            if not isinstance(found, Mapping):
                return Unreadable("is missing")
            found = found.get(key)
        return read_figure(found)

    def whole(self, *path: str) -> int | Unreadable:
        """Return the integer at a path of keys; a fraction or anything else is ``Unreadable``."""
        value = self.figure(*path)
        return Unreadable(f"is no whole number but {value}") if isinstance(value, str) else value

    def flaw(self) -> str | None:
        """Say what cannot be read as it was sent: the line as a whole, or the place of a value; None if nothing."""
        if isinstance(self.body, Unreadable):
            return self.body.reason
        return next((f"has {place}, which {reason}" for place, reason in _flaws("", self.body)), None)


def _flaws(place: str, value: object) -> Iterator[tuple[str, str]]:
    match value:
        case Mapping():
            for key, inner in value.items():
                yield from _flaws(f"{place}.{key}" if place else str(key), inner)
        case list():
            for index, inner in enumerate(value):
                yield from _flaws(f"{place}[{index}]", inner)
        case Unreadable():
            yield place, value.reason
        case float() if not math.isfinite(value):
            yield place, "is NaN" if math.isnan(value) else "is infinite"


@dataclass(frozen=True)
class Replay:
    """What replaying a recorded trace gave in trusted code; bytes, and counts of events.

    ``exact``: the allocator model reproduced every event and both recorded peaks; ``divergence`` says where not.
    ``stages`` are the recording's marks in order, for example ``forward/0``.
    """

    exact: bool
    peak_allocated: int
    peak_reserved: int
    allocated_after: int
    segments_freed: int
    out_of_memory: int
    stages: tuple[str, ...]
    divergence: str | None = None

    @property
    def backward(self) -> bool:
        """Whether the recording contains a backward stage."""
        return any(stage.startswith("backward/") for stage in self.stages)


@dataclass(frozen=True)
class Observation:
    """Everything about one attempt that a judge may look at.

    ``artifacts`` maps the relative paths of the worker's output files to the hashed files. ``replays`` maps the
    recordings among them (name without ``.trace.json.gz``) to their replay, ``Unreadable`` when there is none.
    ``measured`` maps names to what the supervisor measured itself, in the unit that the name ends with. ``earlier`` is
    the observation of the workload's process before this one, which had ended, and whose files were hashed by then.
    """

    workload: str
    ground: Ground
    exit_code: int | None
    timed_out: bool
    events: tuple[StampedEvent, ...]
    artifacts: Mapping[str, Path] = field(default_factory=dict)
    replays: Mapping[str, Replay | Unreadable] = field(default_factory=dict)
    measured: Mapping[str, Figure] = field(default_factory=dict)
    parameters: Mapping[str, Figure] = field(default_factory=dict)
    earlier: Observation | None = None

    def of(self, kind: str) -> tuple[StampedEvent, ...]:
        """Return the events of one kind, in the order received."""
        return tuple(event for event in self.events if event.kind == kind)


def understood(stamped: Iterable[Stamped]) -> tuple[StampedEvent, ...]:
    """Read the lines that the launcher stamped; one that is no strict JSON is still read for the figures it holds."""
    return tuple(
        StampedEvent(line.sequence, line.monotonic_ns, line.rank, read_object(_text(line))) for line in stamped
    )


def _text(line: Stamped) -> bytes | str:
    return line.malformed or "" if isinstance(line.event, msgspec.UnsetType) else bytes(line.event)
