"""Compose the passes of several subforwards into one sequence of operations, in the order in which a plan runs them.

A recorded pass runs one subforward from its forward to its backward. A plan may interleave the phases of several:
every forward first and the graphs retained, or one pass after the other, or any other order of (pass, phase).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer_rank.errors import InvalidInputError
from trainer_rank.tapes.passes import Action
from trainer_rank.tapes.tape import Path, Tape

WHOLE = ""
"""As a phase: everything that the pass recorded, in order."""


@dataclass(frozen=True)
class PlannedPass:
    """One subforward of a plan: its plan features and the tape recorded for its kind of pass."""

    tape: Tape
    features: Mapping[str, int]
    context: int = 1
    layers: int | None = None


class Turn(NamedTuple):
    """One phase of one pass, by its place in the plan; stages are named ``phase/...`` in recordings."""

    number: int
    phase: str = WHOLE


def sequential(count: int) -> list[Turn]:
    """Return the order in which each pass ends before the next begins."""
    return [Turn(number) for number in range(count)]


def retained(count: int, phases: Sequence[str] = ("forward", "caller", "backward")) -> list[Turn]:
    """Return the order that keeps all graphs: every forward, then the caller, then the backwards, the last first."""
    first, *between, last = phases
    turns = [Turn(number, first) for number in range(count)]
    turns += [Turn(number, phase) for phase in between for number in range(count)]
    return turns + [Turn(number, last) for number in reversed(range(count))]


@dataclass(frozen=True)
class Sized:
    """A path of a tape with the bytes of every allocation and ancestor."""

    tape: Tape
    path: Path
    sizes: tuple[int, ...]
    ancestors: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Operations of all passes in order, as the allocator is to see them: (action, subject, stream).

    Allocations are numbered through the passes, each pass's after those of the one before; ancestor ``~k`` is the
    first pass's. ``turns[i]`` begins at operation ``starts[i]`` and runs the operations ``sources[i]`` of its pass's
    path. ``streams`` counts the streams that allocate.
    """

    operations: tuple[tuple[Action, int, int], ...]
    turns: tuple[Turn, ...]
    starts: tuple[int, ...]
    sources: tuple[Sequence[int], ...]
    streams: int

    def span(self, turn: int) -> range:
        """Return the operations that a turn runs."""
        return range(self.starts[turn], self.starts[turn] + len(self.sources[turn]))

    def place(self, operation: int) -> tuple[int, int]:
        """Return the pass of an operation, and which one of its path it is."""
        turn = bisect_right(self.starts, operation) - 1
        return self.turns[turn].number, self.sources[turn][operation - self.starts[turn]]


def compose(chosen: Sequence[tuple[Tape, Path]], turns: Sequence[Turn]) -> Score:
    """Lay the phases of passes on ``chosen`` paths end to end in the order of ``turns``.

    What the first pass frees without having allocated it is an ancestor in the snapshot; a later pass frees what the
    one before left behind if both are of one tape, or nothing. Raises InvalidInputError when a turn names a pass that
    does not exist, or a phase that its recording does not have.
    """
    paths = [path for _, path in chosen]
    offsets = [sum(len(path.allocations) for path in paths[:number]) for number in range(len(paths))]
    heirs = [_heirs(chosen, number, offsets) for number in range(len(paths))]
    operations: list[tuple[Action, int, int]] = []
    sources: list[Sequence[int]] = []
    starts: list[int] = []
    for turn in turns:
        if not 0 <= turn.number < len(paths):
            raise InvalidInputError(f"turn {turn} names no pass of {len(paths)}")
        starts.append(len(operations))
        path, inherited = paths[turn.number], heirs[turn.number]
        indices = phase_operations(path, turn.phase)
        if None in inherited:
            indices = [k for k in indices if (each := path.operations[k].subject) >= 0 or inherited[~each] is not None]
        sources.append(indices)
        operations += _moved(path, indices, offsets[turn.number], inherited)
    streams = {stream for action, _, stream in operations if action is Action.ALLOCATE}
    return Score(tuple(operations), tuple(turns), tuple(starts), tuple(sources), len(streams))


def _moved(
    path: Path, indices: Sequence[int], offset: int, heirs: Sequence[int | None]
) -> Iterator[tuple[Action, int, int]]:
    """Yield operations with their subjects numbered through all passes; those of the first pass keep theirs."""
    chosen = (path.operations[index] for index in indices)
    if not offset and all(heir == ~k for k, heir in enumerate(heirs)):
        return chosen
    return (
        (action, subject + offset if subject >= 0 else heirs[~subject] or 0, stream)
        for action, subject, stream in chosen
    )


def _heirs(chosen: Sequence[tuple[Tape, Path]], number: int, offsets: Sequence[int]) -> list[int | None]:
    """Return, for each ancestor of a pass, the subject in the composition that stands for it, or None."""
    tape, path = chosen[number]
    if number == 0:
        return [~k for k in range(len(path.ancestors))]
    other, before = chosen[number - 1]
    if not path.ancestors or other is not tape:
        return [None] * len(path.ancestors)
    freed = {subject for action, subject, _ in before.operations if action is not Action.ALLOCATE}
    left: dict[int, list[int]] = {}
    for k, explanation in enumerate(before.allocations):
        if k not in freed:
            left.setdefault(explanation, []).append(offsets[number - 1] + k)
    return [left[each].pop(0) if left.get(each) else None for each in path.ancestors]


def phase_operations(path: Path, phase: str) -> Sequence[int]:
    """Return the indices of the operations of ``phase``; raises InvalidInputError when the path has no such phase."""
    if phase == WHOLE:
        return range(len(path.operations))
    ends = [*(first for first, _ in path.stages[1:]), len(path.operations)]
    found = [
        index
        for (first, stage), end in zip(path.stages, ends, strict=True)
        if stage.partition("/")[0] == phase
        for index in range(first, end)
    ]
    if not found and all(stage.partition("/")[0] != phase for _, stage in path.stages):
        named = ", ".join(dict.fromkeys(stage.partition("/")[0] for _, stage in path.stages))
        raise InvalidInputError(f"the tape has no phase {phase!r}, only {named}; record it with its phases marked")
    return found
