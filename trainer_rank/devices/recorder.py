"""What a recording of allocator events is on every device: marks, and the trace when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.allocator.trace import Event, Trace
from trainer_rank.errors import TraceError


class TraceRecording:
    """A recording in progress; implements :class:`trainer_rank.devices.protocol.Recording`.

    ``position`` counts the events so far; ``before`` is the allocator's state at the start; ``outside`` reads the bytes
    that this device holds outside PyTorch's allocator.
    """

    def __init__(self, position: Callable[[], int], before: Snapshot, outside: Callable[[], int]) -> None:
        self._position = position
        self._before = before
        self._outside = outside
        self._marks: list[tuple[int, str]] = []
        self._phases: list[tuple[str, int]] = [("start", outside())]
        self._result: Trace | TraceError | None = None

    def mark(self, stage: str) -> None:
        """Attribute the events that follow to ``stage``; a new first part of its name is a new phase."""
        if self._result is not None:
            return
        phase = stage.partition("/")[0]
        last = self._marks[-1][1].partition("/")[0] if self._marks else None
        if last is not None and last != phase:
            self._phases.append((last, self._outside()))
        self._marks.append((self._position(), stage))

    @property
    def outside(self) -> tuple[tuple[str, int], ...]:
        """Bytes outside PyTorch's allocator (physical minus reserved) at the start and at the end of each phase."""
        return tuple(self._phases)

    def finish(
        self,
        events: Sequence[Event],
        after: Snapshot,
        peak_allocated: int,
        peak_reserved: int,
        memory_info: tuple[int, int],
        positions: Sequence[int] | None = None,
    ) -> None:
        """End the recording with what was seen; ``positions`` turns the counts of the marks into event indices."""
        marks = self._marks if positions is None else [(positions[count], stage) for count, stage in self._marks]
        if marks:
            self._phases.append((marks[-1][1].partition("/")[0], self._outside()))
        self._result = Trace(
            before=self._before,
            events=tuple(events),
            after=after,
            peak_allocated=peak_allocated,
            peak_reserved=peak_reserved,
            memory_info=(memory_info[0], memory_info[1]),
            features={},
            marks=tuple(marks),
        )

    def fail(self, error: TraceError) -> None:
        """End the recording as unusable."""
        self._result = error

    def trace(self) -> Trace:
        """Return the trace; raises TraceError while the recording runs, or when its history is not complete."""
        if self._result is None:
            raise TraceError("the recording has not ended; leave its context first")
        if isinstance(self._result, TraceError):
            raise self._result
        return self._result
