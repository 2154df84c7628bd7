"""Forecast the peaks of a plan: choose the path, size every allocation, replay from the live snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainer_rank.allocator.rules import LARGE_SEGMENT
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.features import FEATURES, PACKED_TOKENS
from trainer_rank.tapes.ancestors import find_ancestors
from trainer_rank.tapes.explain import Grounds
from trainer_rank.tapes.simulate import Peaks, simulate, unlimited
from trainer_rank.tapes.tape import Part, Path, Tape


class Status(StrEnum):
    """How far the recordings reach a plan."""

    COVERED = "covered"
    EXTRAPOLATED = "extrapolated"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Figures:
    """Peaks in bytes. ``device_used`` adds what lies outside PyTorch; None when that was not given."""

    allocated: int
    reserved: int
    device_used: int | None


@dataclass(frozen=True)
class Forecast:
    """What a plan will take. ``expected`` and ``bound`` are None exactly when ``status`` is unknown.

    ``bound`` holds every rule and path that the recordings allow, and a margin. ``stage`` is where allocated memory
    peaks. ``uncovered`` names what no recording covers; ``notes`` name ranges and allocations that widen the bound.
    """

    status: Status
    expected: Figures | None
    bound: Figures | None
    stage: str | None = None
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
    part = tape.part(context, layers)
    if part is None:
        size = f"{context} context ranks" + ("" if layers is None else f" and {layers} layers")
        missing = (*missing, f"topology with {size}: record one probe of it")
    if missing or part is None:
        return Forecast(Status.UNKNOWN, None, None, uncovered=missing)
    chosen = choose_paths(part, features)
    unknown = _unsized(tape, chosen[0], features)
    if unknown:
        return Forecast(Status.UNKNOWN, None, None, uncovered=unknown)
    notes = [*_outside(part, features), *_unsure(tape, chosen)]
    expected = _replay(tape, chosen[0], features, snapshot, upper=False, lowest=False)
    raised = [
        _replay(tape, path, features, snapshot, upper=True, lowest=lowest)
        for path in chosen
        for lowest in (False, True)
        if not _unsized(tape, path, features)
    ]
    status = Status.EXTRAPOLATED if _outside(part, features) else Status.COVERED
    share = 16 if status is Status.EXTRAPOLATED else 64
    allocated = max(peaks.allocated.size for peaks in (expected, *raised))
    reserved = max(peaks.reserved.size for peaks in (expected, *raised))
    grown = (allocated - snapshot.allocated, reserved - snapshot.reserved)
    return Forecast(
        status,
        _figures(expected.allocated.size, expected.reserved.size, outside),
        _figures(allocated + grown[0] // (4 * share), reserved + grown[1] // share + LARGE_SEGMENT, outside),
        stage=stage_of(chosen[0], expected.allocated.operation),
        notes=tuple(notes),
    )


def choose_paths(part: Part, features: Mapping[str, int]) -> list[Path]:
    """Return the path to expect first, then those that the plan may take instead.

    Events change order somewhere between the probes of two paths: up to the larger probe the smaller path is expected.
    """
    rows = features.get(PACKED_TOKENS, 0)
    around = [path for path in part.paths if _rows(path)[0] <= rows <= _rows(path)[1]]
    if around:
        return sorted(around, key=lambda path: min(abs(each.features[PACKED_TOKENS] - rows) for each in path.probes))
    below = [path for path in part.paths if _rows(path)[1] < rows]
    above = [path for path in part.paths if _rows(path)[0] > rows]
    nearest = sorted(below, key=lambda path: _rows(path)[1])[-1:]
    return [*nearest, *above[:1]]


def stage_of(path: Path, operation: int) -> str:
    """Return the stage of an operation; before the first lies the start."""
    names = [name for first, name in path.stages if first <= operation]
    return names[-1] if names else "start"


def _rows(path: Path) -> tuple[int, int]:
    rows = [probe.features[PACKED_TOKENS] for probe in path.probes]
    return min(rows), max(rows)


def _unsized(tape: Tape, path: Path, features: Mapping[str, int]) -> tuple[str, ...]:
    bad = {k for k in set(path.allocations) if tape.explanations[k].rule.size(features) is None}
    return tuple(
        f"allocation {ordinal} in {stage_of(path, _birth(path, ordinal))}: "
        f"{tape.explanations[k].rule.describe()} gives no size here; record a probe nearer to it"
        for ordinal, k in enumerate(path.allocations)
        if k in bad
    )[:8]


def _birth(path: Path, ordinal: int) -> int:
    return next(index for index, each in enumerate(path.operations) if each.action == 0 and each.subject == ordinal)


def _outside(part: Part, features: Mapping[str, int]) -> list[str]:
    notes = []
    for name in FEATURES:
        known = [probe.features[name] for path in part.paths for probe in path.probes if name in probe.features]
        value = features.get(name)
        if known and value is not None and not min(known) <= value <= max(known):
            notes.append(f"{name} {value} lies outside the probes ({min(known)} to {max(known)})")
    return notes


def _unsure(tape: Tape, paths: Sequence[Path]) -> list[str]:
    notes = []
    if len(paths) > 1:
        known = sorted(each.features[PACKED_TOKENS] for path in paths for each in path.probes)
        notes.append(f"the order of events changes between probes of {known[0]} to {known[-1]} packed tokens")
    used = [tape.explanations[k].grounds for k in paths[0].allocations]
    for grounds in (Grounds.ONCE, Grounds.UNCHECKED, Grounds.INEXACT):
        count = used.count(grounds)
        if count:
            notes.append(f"{count} allocations rest on too few probes ({grounds})")
    return notes


def _replay(
    tape: Tape, path: Path, features: Mapping[str, int], snapshot: Snapshot, *, upper: bool, lowest: bool
) -> Peaks:
    sizes = {k: tape.size(k, features, upper=upper) or 0 for k in {*path.allocations, *path.ancestors}}
    allocator = unlimited(snapshot)
    live = allocator.live()
    found = find_ancestors(snapshot, [tape.explanations[k].rule.size(features) for k in path.ancestors], lowest=lowest)
    handles = {~k: live[address][0] for k, address in enumerate(found) if address is not None}
    return simulate(allocator, path.operations, [sizes[k] for k in path.allocations], handles, streams_of(snapshot))


def streams_of(snapshot: Snapshot) -> dict[int, int]:
    """Map stream numbers of a tape to the snapshot's: the default stream first, others in order of address."""
    raw = dict.fromkeys(segment.stream for segment in snapshot.segments if segment.stream)
    return dict(enumerate((0, *raw)))


def _figures(allocated: int, reserved: int, outside: int | None) -> Figures:
    return Figures(allocated, reserved, None if outside is None else reserved + outside)
