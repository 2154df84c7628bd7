"""One recorded pass as plain data: births and deaths of allocations, free of addresses.

An allocation is known by its ordinal in the pass. A block that was live before the pass and dies in it is an
*ancestor*, known by its order of death. Segment events follow from these and are dropped; zero bytes own nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from trainer_rank.allocator.snapshot import ACTIVE, INACTIVE
from trainer_rank.allocator.trace import Event, Trace
from trainer_rank.errors import InvalidInputError, TapeError
from trainer_rank.features import LARGEST, recorded_features

UNNAMED_STAGE = "step"
"""The stage of events that no mark names."""


class Action(IntEnum):
    """What happens to a block. A free by another stream's use has two moments: the request and its completion."""

    ALLOCATE = 0
    FREE = 1
    REQUEST_FREE = 2
    COMPLETE_FREE = 3
    RELEASE = 4


class Operation(NamedTuple):
    """``subject`` is the ordinal of an allocation; ``~subject`` (negative) that of an ancestor; 0 for a release."""

    action: Action
    subject: int
    stream: int


@dataclass(frozen=True)
class Pass:
    """The operations of a pass with the requested bytes of every allocation and ancestor.

    ``stages[i]`` names the stage of ``operations[i]``. Streams are numbered: 0 is the default stream, others follow
    in order of first use. ``features`` are the plan's, ``layers`` the model's when stated.
    """

    features: dict[str, int]
    context: int
    layers: int | None
    operations: tuple[Operation, ...]
    stages: tuple[str, ...]
    sizes: tuple[int, ...]
    ancestors: tuple[int, ...]
    source: str


def read_pass(trace: Trace) -> Pass:
    """Pair every free with its allocation. TapeError names the first event that contradicts the history."""
    reader = _Reader(trace)
    for index, event in enumerate(trace.events):
        reader.read(index, event)
    return reader.finish()


def stated_features(trace: Trace) -> dict[str, int]:
    """Return the plan features that a recording states; an InvalidInputError names it where it states too little."""
    try:
        return recorded_features(trace.features)
    except InvalidInputError as error:
        raise InvalidInputError(f"{trace.source}: {error}") from None


class _Reader:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.live: dict[int, int] = {}
        self.before = {
            block.address: block.requested or block.size
            for segment in trace.before.segments
            for block in segment.blocks
            if block.state != INACTIVE
        }
        self.pending = {
            block.address
            for segment in trace.before.segments
            for block in segment.blocks
            if block.state not in (ACTIVE, INACTIVE)
        }
        self.requested: dict[int, tuple[int, int]] = {}
        self.operations: list[Operation] = []
        self.stages: list[str] = []
        self.sizes: list[int] = []
        self.ancestors: list[int] = []
        self.streams = {0: 0}
        self.marks = list(reversed(trace.marks))
        self.stage = UNNAMED_STAGE

    def read(self, index: int, event: Event) -> None:
        while self.marks and self.marks[-1][0] <= index:
            self.stage = self.marks.pop()[1]
        if event.size == 0 or event.action in ("snapshot", "segment_alloc"):
            return
        if event.action == "alloc":
            self._allocate(index, event)
        elif event.action == "free_requested":
            self._request(index, event)
        elif event.action == "free_completed":
            self._complete(index, event)
        elif event.action == "segment_free":
            if not (self.operations and self.operations[-1].action is Action.RELEASE):
                self._add(Operation(Action.RELEASE, 0, 0))
        else:
            raise TapeError(f"{self._event(index)} is {event.action!r}, which no tape covers; record a pass without it")

    def finish(self) -> Pass:
        features = dict(self.trace.features or {})
        if not self.sizes:
            raise TapeError(f"{self.trace.source}: nothing was allocated in the recorded pass; record a full pass")
        return Pass(
            features=stated_features(self.trace),
            context=features.get("context", 1),
            layers=features.get("layers"),
            operations=tuple(self.operations),
            stages=tuple(self.stages),
            sizes=tuple(self.sizes),
            ancestors=tuple(self.ancestors),
            source=self.trace.source,
        )

    def _event(self, index: int) -> str:
        return f"{self.trace.source}: event {index}"

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.stages.append(self.stage)

    def _stream(self, raw: int) -> int:
        return self.streams.setdefault(raw, len(self.streams))

    def _allocate(self, index: int, event: Event) -> None:
        if event.address in self.live or event.address in self.before or event.address in self.requested:
            raise TapeError(
                f"{self._event(index)} allocates {event.address:#x}, which is still live: "
                "the recording lost events; record again"
            )
        if event.size >= LARGEST:
            raise TapeError(f"{self._event(index)} asks for {event.size} B, more than 1 EiB: a broken number")
        self.live[event.address] = len(self.sizes)
        self._add(Operation(Action.ALLOCATE, len(self.sizes), self._stream(event.stream)))
        self.sizes.append(event.size)

    def _request(self, index: int, event: Event) -> None:
        if event.address in self.live:
            subject = self.live.pop(event.address)
        elif event.address in self.before and event.address not in self.pending:
            subject = ~len(self.ancestors)
            self.ancestors.append(self.before.pop(event.address))
        else:
            raise TapeError(
                f"{self._event(index)} frees {event.address:#x}, which nobody allocated: "
                "the recording began late or lost events; record again"
            )
        self.requested[event.address] = (subject, len(self.operations))
        self._add(Operation(Action.REQUEST_FREE, subject, self._stream(event.stream)))

    def _complete(self, index: int, event: Event) -> None:
        if event.address in self.pending:
            self.pending.discard(event.address)
            del self.before[event.address]
            return
        if event.address not in self.requested:
            raise TapeError(
                f"{self._event(index)} completes a free of {event.address:#x} that nobody requested: "
                "the recording began late or lost events; record again"
            )
        subject, at = self.requested.pop(event.address)
        if at == len(self.operations) - 1:
            self.operations[at] = self.operations[at]._replace(action=Action.FREE)
        else:
            self._add(Operation(Action.COMPLETE_FREE, subject, self._stream(event.stream)))
