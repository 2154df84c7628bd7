"""Recordings of a steady state: a pass is recorded until it repeats, and what disturbed it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from trainer_rank.allocator.trace import Trace
from trainer_rank.devices.protocol import Device, Recording
from trainer_rank.errors import TraceError

_SEGMENTS = ("segment_alloc", "segment_free")


@dataclass(frozen=True)
class Steady:
    """A recording equal to the one before it.

    ``outside``: bytes outside PyTorch's allocator at the start and at the end of each phase; ``passes``: how often the
    work ran; ``disturbances``: why earlier recordings were not used, in order; ``libraries``: by how many bytes each
    phase made that memory grow at most, in any pass: what libraries took when they were first used.
    """

    trace: Trace
    outside: tuple[tuple[str, int], ...]
    passes: int
    disturbances: tuple[str, ...]
    libraries: tuple[tuple[str, int], ...]


def record_steady(
    device: Device,
    run: Callable[[Recording], None],
    *,
    most_passes: int = 8,
    agree: Callable[[bool], bool] = lambda steady: steady,
) -> Steady:
    """Record ``run`` until a pass agrees with the one before and leaves nothing behind; two passes when all is quiet.

    A model's own caches may take a few passes to turn over (the delta-net kernels keep what they derived from the last
    four batches). ``run`` does the same work each time and marks its stages on the recording it is handed. Where ranks
    run it together, ``agree`` says whether every rank is steady, so that all of them stop after the same pass. Raises
    TraceError with the reasons when no two passes agree within ``most_passes``.
    """
    disturbances: list[str] = []
    libraries: dict[str, int] = {}
    before: Trace | None = None
    for number in range(1, most_passes + 1):
        with device.record() as recording:
            run(recording)
            device.synchronize()
        for (_, earlier), (phase, later) in pairwise(recording.outside):
            libraries[phase] = max(libraries.get(phase, 0), later - earlier)
        trace, reason = _examine(recording, before)
        if agree(trace is not None and before is not None and reason is None):
            assert trace is not None
            return Steady(trace, recording.outside, number, tuple(disturbances), tuple(libraries.items()))
        if reason is not None:
            disturbances.append(f"pass {number}: {reason}")
        before = trace
    raise TraceError(f"no two of {most_passes} passes on {device.name} agree: {'; '.join(disturbances)}")


def _examine(recording: Recording, before: Trace | None) -> tuple[Trace | None, str | None]:
    """The recording's trace, and why it is not used; None for both sides of a first pass's comparison."""
    try:
        trace = recording.trace()
    except TraceError as error:
        return None, str(error)
    return trace, None if before is None else _disturbance(trace, before, recording.outside)


def _disturbance(trace: Trace, before: Trace, outside: tuple[tuple[str, int], ...]) -> str | None:
    """Say what sets this pass apart from the one before it; None when they agree."""
    for (_, earlier), (phase, later) in pairwise(outside):
        if later != earlier:
            return f"{later - earlier:+d} B outside PyTorch's allocator in {phase}: a library was loaded or let go"
    for index, (ours, theirs) in enumerate(zip_longest(_work(trace), _work(before))):
        if ours != theirs:
            return (
                f"allocation event {index} is {_told(ours)} after {_told(theirs)}: autotuning, or a cache being filled"
            )
    left = trace.after.allocated - trace.before.allocated if trace.after is not None else 0
    return f"{left} B were left behind: a cache being filled, or a leak" if left else None


def _work(trace: Trace) -> list[tuple[str, int, int]]:
    """What the pass asked of the allocator; which segments served it depends on what was cached."""
    return [(e.action, e.size, e.stream) for e in trace.events if e.action not in _SEGMENTS]


def _told(row: tuple[str, int, int] | None) -> str:
    return "nothing" if row is None else f"{row[0]} of {row[1]} B on stream {row[2]}"
