"""Explain the sizes that one allocation had in several recordings, exactly, by the plan's features.

Simple explanations come first: a constant, a multiple of one feature, a line in one feature, whole blocks of one
feature, any of these held by a floor or a ceiling, two features together. Integers throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import combinations

from trainer_rank.allocator.rules import BLOCK_GRANULE, SMALL_LIMIT
from trainer_rank.features import FEATURES
from trainer_rank.tapes.rules import Rule, Term

Sample = tuple[Mapping[str, int], int]
"""A plan's features and the bytes that the allocation had there."""

BLOCKS = (8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Rows that kernels pad to: a size that is no line in a feature may be one in its started blocks."""


class Grounds(StrEnum):
    """What an explanation rests on."""

    CHECKED = "checked"
    """More recordings agree than the rule has unknowns."""
    UNCHECKED = "unchecked"
    """As many recordings as unknowns: a further probe would settle it."""
    ONCE = "once"
    """Seen at one size only."""
    INEXACT = "inexact"
    """No rule meets every recording; the largest size stands for it."""


@dataclass(frozen=True)
class Explanation:
    """``rule`` is the simplest; ``others``, of other features or forms, may hold as well, and widen the bound."""

    rule: Rule
    others: tuple[Rule, ...]
    grounds: Grounds


def explain(samples: Sequence[Sample]) -> Explanation:
    """Return the rules that give exactly the recorded bytes of every sample. At least one sample."""
    points = _distinct(samples)
    sizes = {size for _, size in points}
    if len(points) == 1:
        return _seen_once(points[0])
    if len(sizes) == 1:
        return Explanation(Rule(constant=sizes.pop()), (), Grounds.CHECKED)
    found: list[tuple[Rule, Grounds]] = []
    for rule, unknowns in _candidates(points):
        names = [term.feature for term in rule.terms]
        fresh = all(names != [term.feature for term in known.terms] for known, _ in found)
        if fresh and all(rule.size(features) == size for features, size in points):
            found.append((rule, Grounds.CHECKED if len(points) > unknowns else Grounds.UNCHECKED))
            if len(found) == 4:
                break
    if not found:
        largest = max(points, key=lambda point: point[1])
        return Explanation(Rule(constant=largest[1]), _seen_once(largest).others, Grounds.INEXACT)
    checked = [rule for rule, grounds in found if grounds is Grounds.CHECKED]
    rules = checked or [rule for rule, _ in found]
    grounds = Grounds.CHECKED if checked else Grounds.UNCHECKED
    extra = () if rules[0].growing else (Rule(constant=max(sizes)),)
    return Explanation(rules[0], (*rules[1:], *extra), grounds)


def _distinct(samples: Sequence[Sample]) -> list[Sample]:
    points: dict[tuple[tuple[str, int], ...], Sample] = {}
    for features, size in samples:
        key = tuple(sorted(features.items()))
        if key not in points or points[key][1] < size:
            points[key] = (features, size)
    return sorted(points.values(), key=lambda point: [point[0].get(name, 0) for name in FEATURES])


def _seen_once(point: Sample) -> Explanation:
    features, size = point
    constant = Rule(constant=size)
    values = [(name, features[name]) for name in FEATURES if features.get(name, 0) > 1]
    exact = [Rule((Term(name, 1, size // value),), size % value) for name, value in values if size >= value]
    above = tuple(Rule((_in_proportion(name, value, size),)) for name, value in values)
    if exact and size > SMALL_LIMIT:
        return Explanation(exact[0], (*above, constant), Grounds.ONCE)
    return Explanation(constant, above, Grounds.ONCE)


def _in_proportion(name: str, value: int, size: int) -> Term:
    """Return a term of just ``size`` bytes or little more at ``value``, and in proportion elsewhere."""
    if size >= value:
        return Term(name, 1, -(-size // value))
    return Term(name, BLOCK_GRANULE * value // size, BLOCK_GRANULE)


def _candidates(points: Sequence[Sample]) -> Iterator[tuple[Rule, int]]:
    """Yield rules with their number of unknowns, simplest first; whoever asks checks them on every sample."""
    names = [name for name in FEATURES if all(name in features for features, _ in points)]
    varying = [name for name in names if len({features[name] for features, _ in points}) > 1]
    yield from ((rule, 1) for name in varying for rule in _proportional(name, 1, points))
    yield from ((rule, 2) for name in varying for rule in _lines(name, 1, points) if rule.growing)
    blocks = [(name, block) for block in BLOCKS for name in varying]
    yield from ((rule, 1) for name, block in blocks for rule in _proportional(name, block, points))
    for name in varying:
        yield from _saturated(name, 1, points)
    yield from ((rule, 2) for name, block in blocks for rule in _lines(name, block, points) if rule.growing)
    yield from _pairs(varying, points)
    for name, block in blocks:
        yield from _saturated(name, block, points)
    yield from ((rule, 2) for name in varying for rule in _lines(name, 1, points) if not rule.growing)


def _units(name: str, block: int, point: Sample) -> int:
    return -(-point[0][name] // block)


def _proportional(name: str, block: int, points: Sequence[Sample]) -> Iterator[Rule]:
    units = _units(name, block, points[-1])
    if units and points[-1][1] % units == 0:
        yield Rule((Term(name, block, points[-1][1] // units),))


def _lines(name: str, block: int, points: Sequence[Sample]) -> Iterator[Rule]:
    ordered = sorted(points, key=lambda point: _units(name, block, point))
    first, last = ordered[0], ordered[-1]
    run = _units(name, block, last) - _units(name, block, first)
    if run and (last[1] - first[1]) % run == 0:
        slope = (last[1] - first[1]) // run
        if slope:
            yield Rule((Term(name, block, slope),), first[1] - slope * _units(name, block, first))


def _saturated(name: str, block: int, points: Sequence[Sample]) -> Iterator[tuple[Rule, int]]:
    """Yield rules that hold the largest size as a ceiling, or the smallest as a floor, of what the others show."""
    ceiling = max(size for _, size in points)
    below = [point for point in points if point[1] < ceiling]
    floor = min(size for _, size in points)
    above = [point for point in points if point[1] > floor]
    for rest, low, high in ((below, None, ceiling), (above, floor, None)):
        if len(rest) > 1:
            for rule in (*_proportional(name, block, rest), *_lines(name, block, rest)):
                if rule.growing:
                    yield Rule(rule.terms, rule.constant, low, high), 3 if rule.constant else 2
        elif rest:
            for rule in _proportional(name, block, rest):
                yield Rule(rule.terms, 0, low, high), 2


def _pairs(names: Sequence[str], points: Sequence[Sample]) -> Iterator[tuple[Rule, int]]:
    """Yield rules in two features, without a constant from three samples on and with one from four."""
    for first, second in combinations(names, 2):
        for constant in (False, True):
            if len(points) >= (4 if constant else 3):
                solution = _solve(first, second, constant, points)
                if solution and all(value.denominator == 1 for value in solution) and min(solution[:2]) > 0:
                    terms = (Term(first, 1, int(solution[0])), Term(second, 1, int(solution[1])))
                    yield Rule(terms, int(solution[2])), 3 if constant else 2


def _solve(first: str, second: str, constant: bool, points: Sequence[Sample]) -> list[Fraction] | None:
    unknowns = 3 if constant else 2
    for chosen in combinations(points, unknowns):
        rows = [
            [*[Fraction(features[first]), Fraction(features[second]), Fraction(1)][:unknowns], Fraction(size)]
            for features, size in chosen
        ]
        solution = _eliminate(rows)
        if solution is not None:
            return solution if constant else [*solution, Fraction(0)]
    return None


def _eliminate(rows: list[list[Fraction]]) -> list[Fraction] | None:
    """Solve a small square system, or return None when it is singular."""
    count = len(rows)
    for column in range(count):
        pivot = next((row for row in range(column, count) if rows[row][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = rows[column][column]
        rows[column] = [value / scale for value in rows[column]]
        for row in range(count):
            if row != column and rows[row][column]:
                factor = rows[row][column]
                rows[row] = [value - factor * top for value, top in zip(rows[row], rows[column], strict=True)]
    return [row[-1] for row in rows]
