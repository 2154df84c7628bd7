"""What a plan takes from the driver, at least and at most, in a fraction of a millisecond and without a replay.

At least: what is live where probes, and larger plans, peak. At most: as if no block ever served another size. Each size
then needs blocks of its own for as many as live at once, and one more, where smaller ones sit in its place. Both depend
on a path's order of events only through small integers, counted once. That replays lie between the two is no theorem
but what random programs from random caches and every recording show (``tests/trainer_rank/tapes/test_limits.py``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

from trainer_rank.allocator.rules import (
    LARGE_SEGMENT,
    LARGE_SEGMENT_LIMIT,
    MIB,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    round_size,
    segment_size,
)
from trainer_rank.features import PACKED_TOKENS
from trainer_rank.tapes.compose import PlannedPass
from trainer_rank.tapes.passes import Action
from trainer_rank.tapes.paths import Ways, explained_sizes, find_ways
from trainer_rank.tapes.same import Same
from trainer_rank.tapes.tape import Path, Tape

BEYOND = (4, 16, 64)
"""How many times larger than the largest probe plans are looked at, to find where they will peak."""


class Limits(NamedTuple):
    """Bytes beyond the start: ``allocated`` at least at the peak, and ``reserved`` at most, with a margin.

    ``extrapolated``: the plan lies outside the probes.
    """

    allocated: int
    reserved: int
    extrapolated: bool


class _Outline(NamedTuple):
    """A path without its sizes.

    ``most``: blocks that live at once, by explanation and stream. ``peaks``: those that live where plans peak in each
    phase, by explanation, beside the ancestors freed by then. ``ancestors``: all that are ever freed.
    """

    most: dict[tuple[int, int], int]
    peaks: tuple[tuple[str, dict[int, int], dict[int, int]], ...]
    ancestors: dict[int, int]


def find_limits(
    passes: Sequence[PlannedPass], held: Iterable[int] = (), phases: Container[str] | None = None
) -> Limits | None:
    """Return the limits of a plan that runs these ``phases`` of each pass, or all; None where something is uncovered.

    ``held``: bytes that the caller may allocate besides, each in one piece.
    """
    found = [_of_pass(Same(each.tape), tuple(each.features.items()), each.context, each.layers) for each in passes]
    known = [each for each in found if each is not None]
    if len(known) < len(passes):
        return None
    growths = [grown for each in known for phase, grown in each.growths if phases is None or phase in phases]
    freed = sum(each.freed for each in known) if len(known) > 1 else 0
    most = sum(each.most for each in known) + sum(segment_size(round_size(size)) for size in held if size)
    return Limits(
        max(0, max(growths, default=0) - freed),
        most + most // 16 + LARGE_SEGMENT,
        any(each.extrapolated for each in known),
    )


class _Pass(NamedTuple):
    """One pass in bytes: ``growths`` at least in each phase, ``freed`` at most of what was there before it."""

    growths: tuple[tuple[str, int], ...]
    freed: int
    most: int
    extrapolated: bool


@lru_cache(maxsize=256)
def _of_pass(same: Same[Tape], features: tuple[tuple[str, int], ...], context: int, layers: int | None) -> _Pass | None:
    tape, stated = same.thing, dict(features)
    ways = find_ways(PlannedPass(tape, stated, context, layers))
    if not isinstance(ways, Ways):
        return None
    outlines = [_outline(same, Same(path)) for path in ways.paths]
    likely = _blocks(outlines[0], explained_sizes(tape, ways.paths[0], stated))
    largest = [
        _blocks(outline, explained_sizes(tape, path, stated, upper=True))
        for outline, path in zip(outlines, ways.paths, strict=True)
    ]
    sized = [each for each in largest if each is not None]
    if likely is None or len(sized) < len(largest):
        return None
    growths = tuple(
        (phase, sum(count * likely[k] for k, count in live.items()) - _freed(before, likely))
        for phase, live, before in outlines[0].peaks
    )
    most = max(map(_segments, outlines, sized)) + ways.beyond
    return _Pass(growths, _freed(outlines[0].ancestors, likely), most, bool(ways.doubts))


def _blocks(outline: _Outline, sizes: Mapping[int, int | None]) -> dict[int, int] | None:
    """Return the block of every explanation, None when one of an allocation has no size."""
    if None in sizes.values() and any(sizes[k] is None for k, _ in outline.most):
        return None
    return {k: round_size(size or 1) for k, size in sizes.items()}


def _freed(ancestors: Mapping[int, int], blocks: Mapping[int, int]) -> int:
    """Return the most that freeing them takes from what is allocated: large blocks may hold a remainder beside."""
    return sum(count * (blocks[k] + (MIB if blocks[k] > SMALL_LIMIT else 0)) for k, count in ancestors.items())


def _segments(outline: _Outline, blocks: Mapping[int, int]) -> int:
    """Return what the driver gives if every size keeps to itself; smaller sizes share segments, half of each unused."""
    total = 0
    shared: defaultdict[tuple[int, int], int] = defaultdict(int)
    for (k, stream), count in outline.most.items():
        block = blocks[k]
        if block >= LARGE_SEGMENT_LIMIT:
            total += (count + 1) * segment_size(block)
        elif block > SMALL_LIMIT:
            shared[stream, LARGE_SEGMENT] += (count + 1) * (block + MIB)
        else:
            shared[stream, SMALL_SEGMENT] += (count + 1) * block
    return total + sum(-(-2 * size // segment) * segment for (_, segment), size in shared.items())


@lru_cache(maxsize=128)
def _outline(tape: Same[Tape], path: Same[Path]) -> _Outline:
    tops = _tops(tape.thing, path.thing)
    most: Counter[tuple[int, int]] = Counter()
    held: Counter[tuple[int, int]] = Counter()
    live: Counter[int] = Counter()
    freed: Counter[int] = Counter()
    born: dict[int, tuple[int, int]] = {}
    peaks = []
    for index, (action, subject, stream) in enumerate(path.thing.operations):
        if action is Action.ALLOCATE:
            kind = born[subject] = (path.thing.allocations[subject], stream)
            live[kind[0]] += 1
            held[kind] += 1
            most[kind] = max(most[kind], held[kind])
        elif action in (Action.FREE, Action.REQUEST_FREE):
            if subject < 0:
                freed[path.thing.ancestors[~subject]] += 1
            else:
                live[born[subject][0]] -= 1
        if subject >= 0 and action is Action.FREE:  # what another stream delays may complete at the very end
            held[born[subject]] -= 1
        if index in tops:
            peaks.append((tops[index], dict(+live), dict(freed)))
    return _Outline(dict(most), tuple(peaks), dict(freed))


def _tops(tape: Tape, path: Path) -> dict[int, str]:
    """Return the operations, with their phase, at which most is live in a phase of the probes and of larger plans."""
    used = sorted({*path.allocations, *path.ancestors})
    places = {k: place for place, k in enumerate(used)}
    signs = {Action.ALLOCATE: 0, Action.FREE: len(used), Action.REQUEST_FREE: len(used)}
    changes = [
        places[path.allocations[subject] if subject >= 0 else path.ancestors[~subject]] + signs[action]
        if action in signs
        else 2 * len(used)
        for action, subject, _ in path.operations
    ]
    largest = max((probe.features for probe in path.probes), key=lambda features: features[PACKED_TOKENS])
    shapes = [probe.features for probe in path.probes]
    shapes += [{name: factor * value for name, value in largest.items()} for factor in BEYOND]
    tops = {}
    for features in shapes:
        sizes = [round_size(tape.size(k, features) or 1) for k in used]
        table = [*sizes, *(-size for size in sizes), 0]
        heights = list(accumulate(map(table.__getitem__, changes)))
        for phase, first, end in _phases(path):
            tops[max(range(first, end), key=heights.__getitem__)] = phase
    return tops


def _phases(path: Path) -> list[tuple[str, int, int]]:
    """Return each phase with the operations [first, end) that it runs without a break."""
    ends = [*(first for first, _ in path.stages[1:]), len(path.operations)]
    runs = ((stage.partition("/")[0], first, end) for (first, stage), end in zip(path.stages, ends, strict=True))
    grouped = (list(group) for _, group in groupby(runs, key=lambda run: run[0]))
    return [(group[0][0], group[0][1], group[-1][2]) for group in grouped]
