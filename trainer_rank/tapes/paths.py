"""Choose the path that a pass will take, and size every allocation on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import log

from trainer_rank.allocator.rules import round_size
from trainer_rank.errors import TapeError
from trainer_rank.features import ADAPTER_BYTES, FEATURES, LARGEST, PACKED_TOKENS, SEQUENCES
from trainer_rank.tapes.beyond import more_sequences, smallest_recorded
from trainer_rank.tapes.compose import PlannedPass, Sized
from trainer_rank.tapes.counts import LAYER, counted
from trainer_rank.tapes.explain import Grounds
from trainer_rank.tapes.passes import Action
from trainer_rank.tapes.same import Same
from trainer_rank.tapes.sections import with_count
from trainer_rank.tapes.tape import Part, Path, Tape

WITHIN, ABOVE, BELOW = range(3)
"""Where a plan's rows lie from the probes of a path, the preferred first."""


@dataclass(frozen=True)
class Choice:
    """What one pass of a plan will do.

    ``expected`` is the likely path with the simplest sizes, ``upper`` the same with the largest that the recordings
    allow, ``other`` another path that may be taken instead, at its largest. All None when something is uncovered.
    ``open_block``: the largest block, in bytes, of an allocation whose size the recordings leave open; 0 when none is,
    ``LARGEST`` when the path itself is, or when another stream delays a free. ``open_bytes``: what ``upper`` adds to
    all blocks of ``expected`` together. ``beyond``: bytes that sequences beyond those of the probes may hold.
    """

    expected: Sized | None
    upper: Sized | None = None
    other: Sized | None = None
    extrapolated: bool = False
    open_block: int = LARGEST
    open_bytes: int = 0
    beyond: int = 0
    uncovered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ways:
    """Paths that a pass may take, the likeliest first, what is doubtful about them, and bytes to add to them."""

    paths: tuple[Path, ...]
    doubts: tuple[str, ...]
    beyond: int


def find_ways(planned: PlannedPass) -> Ways | tuple[str, ...]:
    """Return the paths of a pass, or the names of what no recording covers."""
    part, doubts = find_part(planned.tape, planned.context, planned.layers)
    if part is None:
        return doubts
    try:
        paths = tuple(counted(part, path, planned.features) for path in candidates(part, planned.features))
    except TapeError as error:
        return (str(error),)
    beyond = more_sequences(planned.tape, part, paths, planned.features)
    return Ways(paths, (*doubts, *_outside(part, planned.features)), beyond)


def choose(planned: PlannedPass) -> Choice:
    """Choose paths and sizes for one pass of a plan."""
    tape, features, ways = planned.tape, planned.features, find_ways(planned)
    if not isinstance(ways, Ways):
        return Choice(None, uncovered=ways)
    paths = ways.paths
    likely = explained_sizes(tape, paths[0], features)
    expected = _sized(tape, paths[0], likely)
    if expected is None:
        bad = (ordinal for ordinal, k in enumerate(paths[0].allocations) if not likely[k])
        return Choice(None, uncovered=tuple(_unsized(tape, paths[0], ordinal) for ordinal in islice(bad, 8)))
    largest = explained_sizes(tape, paths[0], features, upper=True)
    more = sum(
        count * (round_size(largest[k] or 1) - round_size(likely[k] or 1)) for k, count in _uses(Same(paths[0])).items()
    )
    return Choice(
        expected,
        _sized(tape, paths[0], largest) if more else expected,
        _sized(tape, paths[1], explained_sizes(tape, paths[1], features, upper=True)) if len(paths) > 1 else None,
        bool(ways.doubts),
        _open_block(tape, likely, largest) if len(paths) == 1 and not _delayed(Same(paths[0])) else LARGEST,
        more,
        beyond=ways.beyond,
        notes=(*ways.doubts, *_unsure(tape, paths, expected)),
    )


def find_part(tape: Tape, context: int, layers: int | None) -> tuple[Part | None, tuple[str, ...]]:
    """Return the part for a topology and layer count, made from another count where sections justify it.

    The names say what is doubtful about it, or, without a part, what no recording covers.
    """
    return _part(Same(tape), context, layers)


@lru_cache(maxsize=16)
def _part(same: Same[Tape], context: int, layers: int | None) -> tuple[Part | None, tuple[str, ...]]:
    tape = same.thing
    part = tape.part(context, layers)
    if part is not None:
        return part, ()
    recorded = max((each for each in tape.parts if each.context == context), key=_layers, default=None)
    if recorded is None or layers is None:
        return None, (f"topology with {context} context ranks: record a probe of it",)
    try:
        paths = tuple(with_count(path, LAYER, layers) for path in recorded.paths)
    except TapeError as error:
        return None, (f"{layers} layers, recorded with {recorded.layers}: {error}",)
    return Part(context, layers, paths), (f"{layers} layers from recordings of {recorded.layers}",)


def _layers(part: Part) -> int:
    return part.layers or 0


def candidates(part: Part, features: Mapping[str, int]) -> list[Path]:
    """Return the path to expect first, then, outside of its probes, the one that the plan may take instead.

    A path belongs to the sequences and adapters of its probes; among equals it reaches from its smallest probe up to
    the next path's smallest: somewhere between the two the order of events changes.
    """
    rows = features.get(PACKED_TOKENS, 0)
    best, *others = sorted(part.paths, key=lambda path: (_strangeness(path, features), *_distance(path, rows)))
    if _strangeness(best, features) > 0:
        return [best, *others[:1]]
    doubt = {WITHIN: WITHIN, ABOVE: BELOW}.get(_distance(best, rows)[0])
    instead = [each for each in others if _distance(each, rows)[0] == doubt and _strangeness(each, features) == 0]
    return [best, *instead[:1]]


def _strangeness(path: Path, features: Mapping[str, int]) -> float:
    """Return how far the plan's sequences and adapters lie from those of the path's probes, as a log of ratios."""
    total = 0.0
    for name in (SEQUENCES, ADAPTER_BYTES):
        known = [probe.features[name] + 1 for probe in path.probes if name in probe.features]
        if known and name in features:
            value = features[name] + 1
            total += max(0.0, log(min(known) / value), log(value / max(known)))
    return total


def _distance(path: Path, rows: int) -> tuple[int, float]:
    """Return where the plan's rows lie from the path's probes, and how far."""
    known = [probe.features[PACKED_TOKENS] for probe in path.probes]
    if min(known) <= rows <= max(known):
        return WITHIN, min(abs(each - rows) for each in known)
    if rows > max(known):
        return ABOVE, rows / max(known)
    return BELOW, min(known) / max(rows, 1)


def explained_sizes(
    tape: Tape, path: Path, features: Mapping[str, int], *, upper: bool = False
) -> dict[int, int | None]:
    """Return the bytes of every explanation that the path uses, None where it gives none at these features."""
    sizes = {k: tape.size(k, features, upper=upper) for k in _uses(Same(path))}
    missing = [k for k, size in sizes.items() if size is None]
    return sizes | {k: smallest_recorded(tape, path, k, features) for k in missing} if missing else sizes


@lru_cache(maxsize=128)
def _uses(path: Same[Path]) -> Counter[int]:
    """Count the allocations and ancestors that each explanation sizes."""
    return Counter((*path.thing.allocations, *path.thing.ancestors))


def _sized(tape: Tape, path: Path, sizes: Mapping[int, int | None]) -> Sized | None:
    """Return the path with its sizes; None when an allocation has none."""
    filled = {k: size or 0 for k, size in sizes.items()}
    allocations = tuple(map(filled.__getitem__, path.allocations))
    ancestors = tuple(map(filled.__getitem__, path.ancestors))
    return Sized(tape, path, allocations, ancestors) if all(allocations) else None


def stage_of(path: Path, operation: int) -> str:
    """Return the stage of an operation."""
    return next(name for first, name in reversed(path.stages) if first <= operation)


def _unsized(tape: Tape, path: Path, ordinal: int) -> str:
    rule = tape.explanations[path.allocations[ordinal]].rule
    return (
        f"allocation {ordinal} in {stage_of(path, _birth(path, ordinal))}: {rule.describe()} gives no size here; "
        "record a probe nearer to it"
    )


def _birth(path: Path, ordinal: int) -> int:
    """Return the operation that allocates."""
    return _births(Same(path))[ordinal]


@lru_cache(maxsize=64)
def _births(path: Same[Path]) -> list[int]:
    operations = enumerate(path.thing.operations)
    return [index for index, (action, _, _) in operations if action is Action.ALLOCATE]


def _outside(part: Part, features: Mapping[str, int]) -> list[str]:
    notes = []
    for name in FEATURES:
        known = [probe.features[name] for path in part.paths for probe in path.probes if name in probe.features]
        value = features.get(name)
        if not known and value and name in (SEQUENCES, ADAPTER_BYTES):
            notes.append(f"{name} {value}: no probe states its own")
        if known and value is not None and not min(known) <= value <= max(known):
            notes.append(f"{name} {value} lies outside the probes ({min(known)} to {max(known)})")
    return notes


@lru_cache(maxsize=64)
def _delayed(path: Same[Path]) -> bool:
    """Tell whether another stream delays a free: when that ends is the device's choice, not the path's."""
    return any(action is Action.COMPLETE_FREE for action, _, _ in path.thing.operations)


def _open_block(tape: Tape, likely: Mapping[int, int | None], largest: Mapping[int, int | None]) -> int:
    """Return the largest block among those that too few probes explain, or whose size other rules make larger."""
    blocks = ((k, round_size(size or 1), round_size(largest[k] or 1)) for k, size in likely.items())
    checked = Grounds.CHECKED
    return max(
        (max(low, high) for k, low, high in blocks if low != high or tape.explanations[k].grounds is not checked),
        default=0,
    )


def _unsure(tape: Tape, paths: Sequence[Path], expected: Sized) -> list[str]:
    notes = []
    if len(paths) > 1:
        known = sorted(each.features[PACKED_TOKENS] for path in paths for each in path.probes)
        notes.append(f"the order of events differs between probes of {known[0]} to {known[-1]} packed tokens")
    for grounds, doubtful in _doubtful(Same(tape), Same(expected.path)):
        largest = sorted(doubtful, key=lambda k: -expected.sizes[k])[:3]
        named = ", ".join(f"{k} in {stage_of(expected.path, _birth(expected.path, k))}" for k in largest)
        notes.append(f"{len(doubtful)} allocations rest on too few probes ({grounds}); the largest are {named}")
    return notes


@lru_cache(maxsize=128)
def _doubtful(tape: Same[Tape], path: Same[Path]) -> list[tuple[Grounds, list[int]]]:
    """Return the allocations that rest on too few probes, by their grounds."""
    found = []
    for grounds in (Grounds.ONCE, Grounds.UNCHECKED, Grounds.INEXACT):
        explained = enumerate(path.thing.allocations)
        if doubtful := [k for k, each in explained if tape.thing.explanations[each].grounds is grounds]:
            found.append((grounds, doubtful))
    return found
