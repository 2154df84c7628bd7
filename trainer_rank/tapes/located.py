"""Find the event of a plan's tapes that an allocation of its execution corresponds to, and what was forecast for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.tapes.compose import PlannedPass, Score, Turn
from trainer_rank.tapes.forecast import prepared, start_of
from trainer_rank.tapes.passes import Action
from trainer_rank.tapes.paths import choose, stage_of
from trainer_rank.tapes.same import Same
from trainer_rank.tapes.simulate import simulate

POSITION_AND_SIZE, SIZE, POSITION = "position and size", "size", "position"
"""By what an event was found: its size at its place, the nearest of the same size, or its place alone."""


@dataclass(frozen=True)
class TapeEvent:
    """One allocation of a plan as its tapes have it. Bytes.

    ``ordinal`` counts the allocations of the turns that were searched from 0, ``count`` says how many these have, and
    ``stage`` where the tape has it; ``stream`` is the tape's number, 0 the default stream. ``size`` follows from
    ``rule``, which rests on ``grounds``; ``allocated`` and ``reserved`` are forecast for the moment after it.
    """

    matched: str
    ordinal: int
    count: int
    stage: str
    stream: int
    size: int
    rule: str
    grounds: str
    allocated: int
    reserved: int | None


def locate(
    passes: Sequence[PlannedPass],
    turns: Sequence[Turn],
    snapshot: Snapshot,
    within: Sequence[int],
    position: int,
    same: Callable[[int], bool],
) -> TapeEvent | None:
    """Return the event nearest to the allocation number ``position`` of the turns ``within``, from 0.

    ``same`` says whether a forecast size is the allocation's own: the nearest event of that size is preferred. None
    when no tape covers the plan, or nothing is allocated in these turns.
    """
    expected = [choose(each).expected for each in passes]
    likely = [each for each in expected if each is not None]
    if len(likely) < len(passes) or not within:
        return None
    ready = prepared(likely, tuple(turns), start_of(Same(snapshot)))
    births = _births(ready.score, within)
    if not births:
        return None
    sizes = [ready.sizes[ready.score.operations[index][1]] for index in births]
    matched, ordinal = _nearest(sizes, position, same)
    operation = births[ordinal]
    simulate(ready.allocator, islice(ready.score.operations, operation + 1), ready.sizes, ready.handles, ready.streams)
    number, place = ready.score.place(operation)
    path = likely[number].path
    explanation = likely[number].tape.explanations[path.allocations[path.operations[place].subject]]
    return TapeEvent(
        matched=matched,
        ordinal=ordinal,
        count=len(births),
        stage=stage_of(path, place),
        stream=path.operations[place].stream,
        size=sizes[ordinal],
        rule=explanation.rule.describe(),
        grounds=explanation.grounds.value,
        allocated=ready.allocator.allocated,
        reserved=ready.allocator.reserved,
    )


def _births(score: Score, within: Sequence[int]) -> list[int]:
    """Return the operations of these turns that allocate."""
    indices = (index for turn in within for index in score.span(turn))
    return [index for index in indices if score.operations[index][0] is Action.ALLOCATE]


def _nearest(sizes: Sequence[int], position: int, same: Callable[[int], bool]) -> tuple[str, int]:
    place = min(position, len(sizes) - 1)
    alike = [ordinal for ordinal, size in enumerate(sizes) if same(size)]
    if not alike:
        return POSITION, place
    nearest = min(alike, key=lambda ordinal: (abs(ordinal - place), ordinal))
    return (POSITION_AND_SIZE if nearest == position else SIZE), nearest
