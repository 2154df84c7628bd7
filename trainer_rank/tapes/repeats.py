"""Find a model's layers in a pass that was recorded without marks, by their repetition.

Operations that do the same thing over and over, at a constant distance, form a loop. When a loop runs as often as the
model has layers, in forward and again in backward, its instances are the layers: stages ``part-1/layer/0`` and so on.
Anything less is left unnamed, so that nothing is repeated that was not seen to repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from trainer_rank.tapes.passes import UNNAMED_STAGE, Action, Operation

SHORTEST = 6
"""Fewest operations that count as a layer."""

Stages = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class _Loop:
    first: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.count

    def instance(self, operation: int) -> int | None:
        """Return which turn of the loop an operation belongs to."""
        return (operation - self.first) // self.period if self.first <= operation < self.end else None


def layer_stages(operations: Sequence[Operation], explanations: Sequence[int], layers: int) -> Stages:
    """Return the stages of an unmarked pass; ``explanations[i]`` tells by which rule operation i's block is sized."""
    unnamed = ((0, UNNAMED_STAGE),)
    if layers < 2:
        return unnamed
    loops = sorted(_loops(_tokens(operations, explanations), layers), key=lambda loop: loop.first)
    if len(loops) < 2:
        return unnamed
    births = {subject: index for index, (action, subject, _) in enumerate(operations) if action is Action.ALLOCATE}
    numbers = [list(range(layers))]
    for loop in loops[1:]:
        order = _order(operations, births, loops[0], loop)
        if sorted(order) != list(range(layers)):
            return unnamed
        numbers.append(order)
    return tuple(_named(loops, numbers))


def _tokens(operations: Sequence[Operation], explanations: Sequence[int]) -> list[Hashable]:
    return [
        (action, stream, explanation, subject < 0)
        for (action, subject, stream), explanation in zip(operations, explanations, strict=True)
    ]


def _loops(tokens: Sequence[Hashable], count: int) -> list[_Loop]:
    """Return loops of exactly ``count`` turns that do not overlap, the longest first."""
    found: list[_Loop] = []
    for period in range(len(tokens) // count, SHORTEST - 1, -1):
        for loop in _at_period(tokens, period, count):
            if all(loop.end <= other.first or other.end <= loop.first for other in found):
                found.append(loop)
    return found


def _at_period(tokens: Sequence[Hashable], period: int, count: int) -> list[_Loop]:
    found = []
    run = 0
    for index in range(len(tokens) - period + 1):
        if index < len(tokens) - period and tokens[index] == tokens[index + period]:
            run += 1
            continue
        if run >= period:
            loop = _widened(tokens, _Loop(index - run, period, run // period + 1), count)
            if loop.count == count:
                found.append(loop)
        run = 0
    return found


def _widened(tokens: Sequence[Hashable], loop: _Loop, count: int) -> _Loop:
    """Add turns before and after the loop that do nearly the same; the first and the last layer meet other things."""
    model = Counter(tokens[loop.first : loop.first + loop.period])
    while loop.count < count:
        before, after = loop.first - loop.period, loop.end + loop.period
        if before >= 0 and _nearly(model, tokens[before : loop.first]):
            loop = _Loop(before, loop.period, loop.count + 1)
        elif after <= len(tokens) and _nearly(model, tokens[loop.end : after]):
            loop = _Loop(loop.first, loop.period, loop.count + 1)
        else:
            break
    return loop


def _nearly(model: Counter[Hashable], turn: Sequence[Hashable]) -> bool:
    return 10 * (model & Counter(turn)).total() >= 9 * len(turn)


def _order(operations: Sequence[Operation], births: dict[int, int], first: _Loop, loop: _Loop) -> list[int]:
    """Return for each turn of ``loop`` the turn of ``first`` most of whose blocks it frees."""
    order = []
    for turn in range(loop.count):
        start = loop.first + turn * loop.period
        met: Counter[int] = Counter()
        for action, subject, _ in operations[start : start + loop.period]:
            instance = first.instance(births.get(subject, -1))
            if action is not Action.ALLOCATE and instance is not None:
                met[instance] += 1
        order.append(met.most_common(1)[0][0] if met else -1)
    return order


def _named(loops: Sequence[_Loop], numbers: Sequence[Sequence[int]]) -> list[tuple[int, str]]:
    stages: list[tuple[int, str]] = []
    end = 0
    for part, (loop, order) in enumerate(zip(loops, numbers, strict=True), start=1):
        if loop.first > end or not stages:
            stages.append((end, UNNAMED_STAGE))
        stages += [
            (loop.first + turn * loop.period, f"part-{part}/layer/{number}") for turn, number in enumerate(order)
        ]
        end = loop.end
    return [*(stage for stage in stages if stage[0] or loops[0].first), (end, UNNAMED_STAGE)]
