"""Search what a unit or a width may take without asking for every forecast. Pure.

Two facts let plans be passed over: a plan never takes less than its least, which costs no replay, and the least of a
finer cut, or of fewer units, is not larger. So where the least alone exceeds the budget is found by ever longer
strides and then by halving, and full forecasts are asked for on the other side alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from trainer_rank.admission.decide import Demand
from trainer_rank.admission.ladder import Plan, Rung
from trainer_rank.packing import Work


class Forecaster(Protocol):
    """What a plan will take, seen from one memory sample of the device."""

    def demand(self, plan: Plan) -> Demand:
        """Forecast the memory of a plan; unknown where no tape covers it."""

    def least(self, plan: Plan) -> int | None:
        """Return bytes that the plan takes at least, without a replay; None where they are not known so.

        Never more than its demand requires, nor than the least of more units, or of a coarser cut that shares nothing.
        """

    def cost_ns(self, plan: Plan) -> int | None:
        """Forecast the time of a plan, nanoseconds; None where it was not measured. Finer cuts take no less."""


@dataclass(frozen=True)
class Series:
    """The plans that one rung makes of one layout, the coarsest first. ``first`` is the ordinal of its first."""

    rung: Rung
    work: Work
    first: int

    def __len__(self) -> int:
        return len(self.rung.places(self.work))

    @property
    def shares(self) -> bool:
        """Whether some rows serve several requests."""
        return any(group.shares for group in self.work.groups)

    def plan(self, place: int) -> Plan:
        """Return one of the plans."""
        return Plan(self.rung.name, self.work[self.rung.places(self.work)[place]], self.rung.retention)


class Ways:
    """Every plan of one unit of work by ordinal: rung after rung, in each layout after layout, ever finer."""

    def __init__(self, works: Sequence[Work], rungs: Sequence[Rung]) -> None:
        self.series: list[Series] = []
        for rung in rungs:
            for work in works:
                self.series.append(Series(rung, work, len(self)))

    def __len__(self) -> int:
        return self.series[-1].first + len(self.series[-1]) if self.series else 0

    def plan(self, ordinal: int) -> Plan:
        """Return the plan with this ordinal."""
        series = next(each for each in reversed(self.series) if each.first <= ordinal)
        return series.plan(ordinal - series.first)

    def worth_trying(self, forecaster: Forecaster, available: int, by_cost: bool) -> Iterator[tuple[int, Plan]]:
        """Yield the plans whose least may fit, with their ordinals, the cheapest first or in the ladder's order.

        Of a series in which none may, that which comes nearest is yielded all the same.
        """
        begun = [(each, _within(each, forecaster, available)) for each in self.series if len(each)]
        heads: list[tuple[int, int, int]] = []
        for number, (each, places) in enumerate(begun if by_cost else ()):
            cost = forecaster.cost_ns(each.plan(places[0]))
            if cost is not None:
                heads.append((cost, each.first + places[0], number))
        if len(heads) == len(begun):
            yield from _merged(begun, heads, forecaster)
        else:
            yield from ((each.first + at, each.plan(at)) for each, places in begun for at in places)


def _merged(
    series: Sequence[tuple[Series, Sequence[int]]], heads: list[tuple[int, int, int]], forecaster: Forecaster
) -> Iterator[tuple[int, Plan]]:
    """Yield from the heads (cost, ordinal, series) on, always the cheapest next; a plan is made when its turn comes."""
    left = [iter(places[1:]) for _, places in series]
    heapify(heads)
    while heads:
        cost, ordinal, number = heads[0]
        each = series[number][0]
        yield ordinal, each.plan(ordinal - each.first)
        after = next(left[number], None)
        if after is None:
            heappop(heads)
        else:
            dearer = forecaster.cost_ns(each.plan(after))
            heapreplace(heads, (max(cost, dearer or cost), each.first + after, number))


def _within(series: Series, forecaster: Forecaster, available: int) -> Sequence[int]:
    """Return the places of the plans whose least may fit, or else of the coarsest of those with the smallest least.

    A finer cut never needs more, unless it packs again what a coarser one shares.
    """
    end = len(series)
    found: dict[int, int] = {}

    def least(place: int) -> int:
        if place not in found:
            known = forecaster.least(series.plan(place))
            found[place] = available if known is None else known
        return found[place]

    if series.shares:
        places: Sequence[int] = [place for place in range(end) if least(place) <= available]
        return places or [min(range(end), key=least)]
    first = first_not(lambda place: least(place) > available, end)
    return range(first, end) if first < end else [first_not(lambda place: least(place) > least(end - 1), end)]


def first_not(holds: Callable[[int], bool], end: int) -> int:
    """Return the first place from 0 where ``holds`` does not, ``end`` when it does everywhere; it holds in one stretch.

    Places near the beginning are asked about first.
    """
    low, high, stride = -1, end, 1
    while low + 1 < high:
        middle = min(low + stride, high - 1) if high == end else (low + high) // 2
        if holds(middle):
            low, stride = middle, 2 * stride
        else:
            high = middle
    return high


def widest(most: int, exceeds: Callable[[int], bool], fits: Callable[[int], bool]) -> int:
    """Return the largest width from 1 to ``most`` that fits, 0 when none does.

    ``exceeds`` tells widths that cannot fit, all those above the narrowest one. Below it the search goes down from the
    widest by ever longer strides, and then up again by halves: where larger widths fit between others that do not, it
    prefers them.
    """
    high = first_not(lambda width: not exceeds(width + 1), most) + 1
    low, stride = high, 1
    while low > 0:
        low = max(0, high - stride) if stride > 1 else high - 1
        if low == 0 or fits(low):
            break
        high, stride = low, 2 * stride
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
