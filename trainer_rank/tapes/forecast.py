"""Forecast the peaks of a plan: choose paths, size every allocation, compose, and replay from the live snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.rules import LARGE_SEGMENT
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.tapes.ancestors import find_ancestors
from trainer_rank.tapes.compose import PlannedPass, Score, Turn, compose, sequential
from trainer_rank.tapes.paths import Choice, choose, stage_of
from trainer_rank.tapes.simulate import copied, simulate, streams_of, unlimited
from trainer_rank.tapes.tape import Tape


class Status(StrEnum):
    """How far the recordings reach a plan."""

    COVERED = "covered"
    EXTRAPOLATED = "extrapolated"
    UNKNOWN = "unknown"


class Figures(NamedTuple):
    """Peaks in bytes. ``device_used`` adds what lies outside PyTorch; None when that was not given."""

    allocated: int
    reserved: int
    device_used: int | None


class TurnPeaks(NamedTuple):
    """Expected bytes while one turn of the plan runs, and what stays allocated when it has ended."""

    turn: Turn
    allocated: int
    reserved: int
    left: int


@dataclass(frozen=True)
class Forecast:
    """What a plan will take. ``expected`` and ``bound`` are None exactly when ``status`` is unknown.

    ``bound`` holds every rule and path that the recordings allow, and a margin. Allocated memory peaks in ``stage`` of
    pass ``number``. ``uncovered`` names what no recording covers; ``notes`` name what widens the bound.
    """

    status: Status
    expected: Figures | None
    bound: Figures | None
    number: int | None = None
    stage: str | None = None
    turns: tuple[TurnPeaks, ...] = ()
    uncovered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def slack(self) -> Figures | None:
        """Return how far the bound lies above what is expected, in bytes."""
        if self.expected is None or self.bound is None:
            return None
        used = None
        if self.bound.device_used is not None and self.expected.device_used is not None:
            used = self.bound.device_used - self.expected.device_used
        return Figures(
            self.bound.allocated - self.expected.allocated, self.bound.reserved - self.expected.reserved, used
        )


def forecast(
    tape: Tape,
    features: Mapping[str, int],
    snapshot: Snapshot,
    *,
    context: int = 1,
    layers: int | None = None,
    stages: Sequence[str] = (),
    outside: int | None = None,
) -> Forecast:
    """Forecast one pass with these plan features from ``snapshot``.

    ``stages`` are what the plan will run (head, optimizer, ...); those no recording covers make the answer unknown.
    ``outside`` is what this process holds outside PyTorch, in bytes.
    """
    missing = tuple(f"stage {stage}" for stage in stages if stage not in tape.covers)
    planned = PlannedPass(tape, features, context, layers)
    if missing:
        return Forecast(Status.UNKNOWN, None, None, uncovered=missing)
    return forecast_plan([planned], sequential(1), snapshot, outside=outside)


def forecast_plan(
    passes: Sequence[PlannedPass],
    turns: Sequence[Turn],
    snapshot: Snapshot,
    *,
    outside: int | None = None,
) -> Forecast:
    """Forecast a plan of several passes whose phases run in the order of ``turns``, from ``snapshot``.

    Raises InvalidInputError when a turn names a phase that the tape does not have.
    """
    choices = [choose(each) for each in passes]
    uncovered = tuple(dict.fromkeys(name for each in choices for name in each.uncovered))
    likely = [each.expected for each in choices if each.expected is not None]
    if uncovered or len(likely) < len(choices):
        return Forecast(Status.UNKNOWN, None, None, uncovered=uncovered)
    start = unlimited(snapshot)
    score = compose(likely, turns)
    expected = _replay(score, start, snapshot)
    widest = [expected, *_alternatives(choices, score, start, snapshot)]
    extrapolated = any(each.extrapolated for each in choices)
    allocated, reserved = max(each.allocated for each in widest), max(each.reserved for each in widest)
    share = 16 if extrapolated else 64
    number, operation = score.places[expected.peak] if expected.peak >= 0 else (None, -1)
    return Forecast(
        Status.EXTRAPOLATED if extrapolated else Status.COVERED,
        _figures(expected.allocated, expected.reserved, outside),
        _figures(
            allocated + (allocated - start.allocated) // (4 * share),
            reserved + (reserved - start.reserved) // share + LARGE_SEGMENT,
            outside,
        ),
        number,
        "start" if number is None else stage_of(likely[number].path, operation),
        expected.turns,
        notes=tuple(dict.fromkeys(note for each in choices for note in each.notes)),
    )


class _Replayed(NamedTuple):
    allocated: int
    reserved: int
    peak: int
    turns: tuple[TurnPeaks, ...]


def _alternatives(
    choices: Sequence[Choice], score: Score, start: CachingAllocator, snapshot: Snapshot
) -> Iterator[_Replayed]:
    """Replay what else the recordings allow; nothing where there is nothing else."""
    upper = [each.upper or each.expected for each in choices]
    other = [each.other or upper[number] for number, each in enumerate(choices)]
    scores = [compose([each for each in sized if each], score.turns) for sized in (upper, other)]
    for number, each in enumerate(scores):
        if each not in (score, *scores[:number]):
            yield _replay(each, start, snapshot)
        if each.ancestors and each not in scores[:number]:
            yield _replay(each, start, snapshot, lowest=True)


def _replay(score: Score, start: CachingAllocator, snapshot: Snapshot, *, lowest: bool = False) -> _Replayed:
    allocator = copied(start)
    handles: dict[int, int] = {}
    if score.ancestors:
        live = allocator.live()
        found = find_ancestors(snapshot, score.ancestors, lowest=lowest)
        handles = {~k: live[address][0] for k, address in enumerate(found) if address is not None}
    streams = streams_of(snapshot)
    turns = []
    high, top, peak = start.allocated, start.reserved, -1
    ends = [*score.starts[1:], len(score.operations)]
    for turn, first, end in zip(score.turns, score.starts, ends, strict=True):
        peaks = simulate(allocator, score.operations[first:end], score.sizes, handles, streams)
        if peaks.allocated.size > high:
            high, peak = peaks.allocated.size, first + peaks.allocated.operation
        top = max(top, peaks.reserved.size)
        turns.append(TurnPeaks(turn, peaks.allocated.size, peaks.reserved.size, allocator.allocated))
    return _Replayed(high, top, peak, tuple(turns))


def _figures(allocated: int, reserved: int, outside: int | None) -> Figures:
    return Figures(allocated, reserved, None if outside is None else reserved + outside)
