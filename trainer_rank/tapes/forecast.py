"""Forecast the peaks of a plan: choose paths, size every allocation, compose, and replay from the live snapshot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.rules import LARGE_SEGMENT, SMALL_LIMIT, round_size, segment_size
from trainer_rank.allocator.snapshot import Segment, Snapshot
from trainer_rank.tapes.ancestors import find_ancestors
from trainer_rank.tapes.compose import PlannedPass, Score, Sized, Turn, compose, sequential
from trainer_rank.tapes.limits import find_limits
from trainer_rank.tapes.passes import Action
from trainer_rank.tapes.paths import Choice, choose, stage_of
from trainer_rank.tapes.same import Same
from trainer_rank.tapes.simulate import NOBODY, copied, simulate, streams_of, unlimited
from trainer_rank.tapes.tape import Path, Tape


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

    ``bound`` holds every rule and path that the recordings allow, what a caller may hold besides, and a margin where
    the recordings leave a size open. Allocated memory peaks in ``stage`` of pass ``number``. ``streams`` are (stream,
    bytes reserved for it in the end) where there are several: a block freed on one never serves another. ``uncovered``
    names what no recording covers; ``notes`` what widens the bound.
    """

    status: Status
    expected: Figures | None
    bound: Figures | None
    number: int | None = None
    stage: str | None = None
    turns: tuple[TurnPeaks, ...] = ()
    streams: tuple[tuple[int, int], ...] = ()
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
    missing = tuple(f"stage {stage}: record a pass that runs it" for stage in stages if stage not in tape.covers)
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
    held: Mapping[int, int] = MappingProxyType({}),
    room: int | None = None,
    most: int | None = None,
) -> Forecast:
    """Forecast a plan of several passes whose phases run in the order of ``turns``, from ``snapshot``.

    ``held``: bytes by turn that the caller may allocate besides at the turn's end, and keep to the end of the plan.
    ``room``: bytes to take from the driver; what is clear about them after one replay is not replayed again. ``most``:
    what is taken at most, where that is known already.
    Raises InvalidInputError when a turn names a phase that the tape does not have.
    """
    choices = [_choice(Same(each.tape), tuple(each.features.items()), each.context, each.layers) for each in passes]
    uncovered = tuple(dict.fromkeys(name for each in choices for name in each.uncovered))
    if uncovered:
        return Forecast(Status.UNKNOWN, None, None, uncovered=uncovered)
    made = _forecast(tuple(map(Same, choices)), tuple(turns), Same(snapshot), tuple(sorted(held.items())), room, most)
    if outside is None or made.expected is None or made.bound is None:
        return made
    expected, bound = (each._replace(device_used=each.reserved + outside) for each in (made.expected, made.bound))
    return replace(made, expected=expected, bound=bound)


def prepare(tape: Tape) -> None:
    """Count once what every plan needs of a tape's paths, so that the first decision after loading it need not."""
    for part in tape.parts:
        for path in part.paths:
            planned = PlannedPass(tape, path.probes[0].features, part.context, part.layers)
            find_limits([planned])
            choose(planned)


@lru_cache(maxsize=256)
def _choice(tape: Same[Tape], features: tuple[tuple[str, int], ...], context: int, layers: int | None) -> Choice:
    return choose(PlannedPass(tape.thing, dict(features), context, layers))


@lru_cache(maxsize=64)
def _score(chosen: tuple[tuple[Same[Tape], Same[Path]], ...], turns: tuple[Turn, ...]) -> Score:
    return compose([(tape.thing, path.thing) for tape, path in chosen], turns)


class Start(NamedTuple):
    """The state that every replay of a forecast begins with.

    ``blocks`` are the live handles by address; ``full`` the segments of live blocks that are only counted.
    """

    snapshot: Snapshot
    allocator: CachingAllocator
    blocks: dict[int, int]
    full: dict[int, Segment]


@lru_cache(maxsize=4)
def start_of(snapshot: Same[Snapshot]) -> Start:
    """Return the state that replays from a snapshot begin with."""
    allocator, full = unlimited(snapshot.thing)
    blocks = {address: live[0] for address, live in allocator.live().items()}
    return Start(snapshot.thing, allocator, blocks, full)


@lru_cache(maxsize=16)
def _forecast(
    chosen: tuple[Same[Choice], ...],
    turns: tuple[Turn, ...],
    snapshot: Same[Snapshot],
    held: tuple[tuple[int, int], ...],
    room: int | None,
    most: int | None,
) -> Forecast:
    choices = [each.thing for each in chosen]
    likely = [each.expected for each in choices if each.expected is not None]
    start = start_of(snapshot)
    expected = _replay(likely, turns, start)
    extrapolated = any(each.extrapolated for each in choices)
    bound = _bound(choices, likely, turns, start, expected, dict(held), room, most)
    return Forecast(
        Status.EXTRAPOLATED if extrapolated else Status.COVERED,
        Figures(expected.allocated, expected.reserved, None),
        bound,
        expected.number,
        expected.stage,
        expected.turns,
        expected.streams,
        notes=tuple(dict.fromkeys(note for each in choices for note in each.notes)),
    )


def _bound(
    choices: Sequence[Choice],
    likely: Sequence[Sized],
    turns: tuple[Turn, ...],
    start: Start,
    expected: _Replayed,
    held: Mapping[int, int],
    room: int | None,
    most: int | None,
) -> Figures:
    """Return the bound: with a margin over the likely replay, or at the most, where these decide; else by replays."""
    low, extrapolated = start.allocator, any(each.extrapolated for each in choices)
    callers = sum(segment_size(round_size(size)) for size in held.values())
    more = sum(each.beyond for each in choices)
    added = callers + more
    bound = _widened(expected.allocated + added, expected.reserved + added, low, extrapolated)
    if room is not None and _clear(choices, expected, bound, low.reserved + room):
        return bound
    if most is not None and expected.reserved <= low.reserved + most:
        return Figures(low.allocated + most, low.reserved + most, None)
    widest = [expected]
    for each in _alternatives(choices, likely, turns, start, held):
        widest.append(each)
        if room is not None and each.reserved > low.reserved + room:
            break
    allocated, reserved = max(each.allocated for each in widest), max(each.reserved for each in widest)
    settled = reserved <= expected.reserved + callers and max(each.open_block for each in choices) <= SMALL_LIMIT
    return _widened(allocated + more, reserved + more, low, extrapolated, exact=settled and not extrapolated)


def _clear(choices: Sequence[Choice], expected: _Replayed, bound: Figures, most: int) -> bool:
    """Tell whether further replays cannot change if ``most`` bytes reserved are enough.

    The likely one is too much already; or it is not with its margin, and all that small open blocks may add.
    """
    small = all(each.open_block <= SMALL_LIMIT for each in choices)
    more = segment_size(LARGE_SEGMENT + sum(each.open_bytes for each in choices)) - LARGE_SEGMENT
    return expected.reserved > most or (small and bound.reserved + more <= most)


def _widened(
    allocated: int, reserved: int, start: CachingAllocator, extrapolated: bool, *, exact: bool = False
) -> Figures:
    margin = margins(allocated - start.allocated, reserved - start.reserved, extrapolated, exact=exact)
    return Figures(allocated + margin.allocated, reserved + margin.reserved, None)


def margins(allocated: int, reserved: int, extrapolated: bool, exact: bool = False) -> Figures:
    """Return what the bound adds to a growth of so many bytes: it never shrinks when the growth is larger.

    ``exact``: the recordings leave at most small blocks open, and the replays agree: what is reserved is what they say.
    """
    share = 16 if extrapolated else 64
    return Figures(allocated // (4 * share), 0 if exact else reserved // share + LARGE_SEGMENT, None)


class _Replayed(NamedTuple):
    allocated: int
    reserved: int
    number: int | None
    stage: str
    turns: tuple[TurnPeaks, ...]
    streams: tuple[tuple[int, int], ...]


def _alternatives(
    choices: Sequence[Choice],
    likely: Sequence[Sized],
    turns: tuple[Turn, ...],
    start: Start,
    held: Mapping[int, int],
) -> Iterator[_Replayed]:
    """Replay what else may happen: the largest sizes and the other path that recordings allow, blocks of one size taken
    in another order, frees that another stream delays come last, and what the caller may hold."""
    upper = [choice.upper or sized for choice, sized in zip(choices, likely, strict=True)]
    other = [choice.other or sized for choice, sized in zip(choices, upper, strict=True)]
    chosen = [upper] if other == upper else [other] if upper == list(likely) else [upper, other]
    for each in chosen:
        yield _replay(each, turns, start, otherwise=True, held=held)


class Prepared(NamedTuple):
    """A composed plan before its first operation; what :func:`trainer_rank.tapes.simulate.simulate` needs of it."""

    score: Score
    allocator: CachingAllocator
    sizes: list[int]
    handles: list[int]
    streams: dict[int, int]


def prepared(passes: Sequence[Sized], turns: tuple[Turn, ...], start: Start, *, otherwise: bool = False) -> Prepared:
    """Compose the passes, on a copy of the start, with a block for each ancestor."""
    score = _score(tuple((Same(each.tape), Same(each.path)) for each in passes), turns)
    sizes = [size for each in passes for size in each.sizes]
    allocator = copied(start.allocator, upward=otherwise)
    found = find_ancestors(start.snapshot, passes[0].ancestors, lowest=otherwise)
    handles = [NOBODY] * len(sizes) + _handles(start, allocator, found)[::-1]
    return Prepared(score, allocator, sizes, handles, streams_of(start.snapshot))


def _handles(start: Start, allocator: CachingAllocator, addresses: Sequence[int | None]) -> list[int]:
    """Return the handles of live blocks; a segment that was only counted is modelled in ``allocator`` first."""
    blocks, segments = start.blocks, start.snapshot.segments
    handles = []
    for address in addresses:
        if address is not None and address not in blocks:
            segment = segments[bisect_right(segments, address, key=lambda each: each.address) - 1]
            blocks = blocks | allocator.take_in(segment)
        handles.append(NOBODY if address is None else blocks[address])
    return handles


def _replay(
    passes: Sequence[Sized],
    turns: tuple[Turn, ...],
    start: Start,
    *,
    otherwise: bool = False,
    held: Mapping[int, int] = MappingProxyType({}),
) -> _Replayed:
    score, allocator, sizes, handles, streams = prepared(passes, turns, start, otherwise=otherwise)
    high, top, peak, done = allocator.allocated, allocator.reserved, -1, []
    for index, turn in enumerate(turns):
        span = score.span(index)
        operations = islice(score.operations, span.start, span.stop)
        peaks = simulate(allocator, _latest(operations) if otherwise else operations, sizes, handles, streams)
        if held.get(index):
            allocator.malloc(held[index])
        if peaks.allocated.size > high:
            high, peak = peaks.allocated.size, span.start + peaks.allocated.operation
        high = max(high, allocator.allocated)
        top = max(top, peaks.reserved.size, allocator.reserved)
        done.append(TurnPeaks(turn, peaks.allocated.size, peaks.reserved.size, allocator.allocated))
    number, operation = score.place(peak) if peak >= 0 else (None, -1)
    stage = "start" if number is None else stage_of(passes[number].path, operation)
    return _Replayed(
        high, top, number, stage, tuple(done), _by_stream(allocator, start.full) if score.streams > 1 else ()
    )


def _latest(operations: Iterable[tuple[Action, int, int]]) -> list[tuple[Action, int, int]]:
    """Return the operations with every free that another stream delays at its latest: when the turn has ended."""
    return sorted(operations, key=lambda operation: operation[0] is Action.COMPLETE_FREE)


def _by_stream(allocator: CachingAllocator, full: dict[int, Segment]) -> tuple[tuple[int, int], ...]:
    reserved: dict[int, int] = {}
    segments = full | {segment.address: segment for segment in allocator.snapshot().segments}
    for segment in segments.values():
        reserved[segment.stream] = reserved.get(segment.stream, 0) + segment.total
    return tuple(sorted(reserved.items()))
