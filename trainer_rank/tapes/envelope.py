"""How much a path adds to allocated memory at its peak, answered in microseconds without a replay.

While no size meets its floor or ceiling, live bytes after every allocation are an affine function of the plan's
features, and their peak is the upper envelope of these functions: few of them are ever highest. Which floors and
ceilings are met is a regime; the envelope of each regime is made when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trainer_rank.allocator.rules import BLOCK_GRANULE
from trainer_rank.tapes.passes import Action
from trainer_rank.tapes.rules import Rule
from trainer_rank.tapes.tape import Path, Tape

_Line = tuple[int, ...]
"""Bytes for each unit of the basis, then constant bytes, then the number of live blocks."""


class Growth(NamedTuple):
    """Highest bytes that requests add to what was allocated at the start; blocks are at most ``rounding`` larger."""

    requested: int
    rounding: int


class Envelope:
    """The envelope of one path of a tape, for any plan features that the tape's rules know."""

    def __init__(self, tape: Tape, path: Path) -> None:
        self._path = path
        self._used = sorted({*path.allocations, *path.ancestors})
        self._rules = {k: tape.explanations[k].rule for k in self._used}
        units = {(feature, block) for rule in self._rules.values() for feature, block, _ in rule.terms}
        self._basis = sorted(units)
        held = {rule for rule in self._rules.values() if rule.floor is not None or rule.ceiling is not None}
        self._held = sorted(held, key=Rule.describe)
        self._regimes: dict[tuple[int, ...], list[_Line]] = {}

    def growth(self, features: Mapping[str, int]) -> Growth | None:
        """Return the peak growth, or None when a feature is not given. At most 100 us once its regime is known."""
        try:
            values = [-(-features[feature] // block) for feature, block in self._basis]
        except KeyError:
            return None
        regime = tuple(_side(rule, features) for rule in self._held)
        lines = self._regimes.get(regime)
        if lines is None:
            lines = self._regimes[regime] = self._envelope(regime)
        values += (1, BLOCK_GRANULE - 1)
        best = max(lines, key=lambda line: sum(map(int.__mul__, line, values)))
        rounding = best[-1] * (BLOCK_GRANULE - 1)
        return Growth(sum(map(int.__mul__, best, values)) - rounding, rounding)

    def _envelope(self, regime: Sequence[int]) -> list[_Line]:
        sides = dict(zip(self._held, regime, strict=True))
        lines = {k: self._line(rule, sides.get(rule, 0)) for k, rule in self._rules.items()}
        return _undominated(self._heights(lines))

    def _line(self, rule: Rule, side: int) -> _Line:
        if side:
            held = rule.ceiling if side > 0 else rule.floor
            return (*(0 for _ in self._basis), held or 0, 1)
        terms = {(feature, block): coefficient for feature, block, coefficient in rule.terms}
        return (*(terms.get(unit, 0) for unit in self._basis), rule.constant, 1)

    def _heights(self, lines: Mapping[int, _Line]) -> Iterator[_Line]:
        """Yield what is live, in lines, whenever a free follows allocations; and at the end."""
        live = [0] * (len(self._basis) + 2)
        rising = False
        yield tuple(live)
        for action, subject, _ in self._path.operations:
            if action is Action.ALLOCATE:
                live = list(map(int.__add__, live, lines[self._path.allocations[subject]]))
                rising = True
            elif action in (Action.FREE, Action.REQUEST_FREE):
                if rising:
                    yield tuple(live)
                rising = False
                table = self._path.allocations if subject >= 0 else self._path.ancestors
                live = list(map(int.__sub__, live, lines[table[subject if subject >= 0 else ~subject]]))
        yield tuple(live)


def _side(rule: Rule, features: Mapping[str, int]) -> int:
    """Return 1 where the rule meets its ceiling, -1 where it meets its floor, 0 on its line."""
    value = rule.line(features)
    if value is not None and rule.ceiling is not None and value > rule.ceiling:
        return 1
    return -1 if value is not None and rule.floor is not None and value < rule.floor else 0


def _undominated(lines: Iterator[_Line]) -> list[_Line]:
    """Keep the lines that some features above zero may make the highest."""
    kept: list[_Line] = []
    for line in dict.fromkeys(lines):
        if not any(all(map(int.__ge__, other, line)) for other in reversed(kept)):
            kept = [other for other in kept if not all(map(int.__ge__, line, other))]
            kept.append(line)
    return kept
