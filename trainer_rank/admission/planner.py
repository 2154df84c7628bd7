"""Choose the widest micro-batch that fits whole, or the cheapest rung that fits one unit. Pure; nothing is tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from trainer_rank.admission.budget import Budget
from trainer_rank.admission.decide import Candidate, Coverage, Decision, Demand, Outcome, decide
from trainer_rank.admission.ladder import Plan, Rung, Whole
from trainer_rank.packing import Subforward, slot_groups
from trainer_rank.prefixes import Prefixes
from trainer_rank.requests import RequestShape

Unit = tuple[RequestShape, ...]


class Forecaster(Protocol):
    """What a plan will take, seen from one memory sample of the device."""

    def demand(self, plan: Plan) -> Demand:
        """Forecast the memory of a plan; unknown where no tape covers it."""

    def cost_ns(self, plan: Plan) -> int | None:
        """Forecast the time of a plan, nanoseconds; None where it was not measured."""


@dataclass(frozen=True)
class Choice:
    """A decision with every input that it was made from; ``plan`` is None when nothing was admitted.

    ``remedy`` then names a smaller piece of the same work that would be.
    """

    units: int
    plan: Plan | None
    decision: Decision
    budget: Budget
    candidates: tuple[Candidate, ...]
    demands: tuple[Demand, ...]
    remedy: str | None = None

    @property
    def demand(self) -> Demand | None:
        """The forecast of the chosen plan."""
        for candidate, demand in zip(self.candidates, self.demands, strict=True):
            if candidate.ordinal == self.decision.selected:
                return demand
        return None


def choose(
    units: Sequence[Unit],
    rungs: Sequence[Rung],
    forecaster: Forecaster,
    budget: Budget,
    *,
    oversize: bool = False,
    by_cost: bool = True,
    explain: bool = True,
    prefixes: Prefixes | None = None,
) -> Choice:
    """Choose how many of the pending ``units`` run now, and how.

    Width comes first: as many units as fit undivided, inside what the tapes cover. When not even the first one does,
    the rungs are tried on it alone, the cheapest first, or in the ladder's own order when not ``by_cost``.
    ``explain``: search every rung and then for a remedy when nothing fits; otherwise a budget below zero is refused
    after one look, as no forecast is. ``prefixes``: what the requests
    share, packed once.
    """
    if not explain and budget.available is not None and budget.available < 0:
        plans = _plans(slot_groups(units[0], prefixes), rungs[:1], forecaster, by_cost)[:1]
        return _climb(plans, forecaster, budget, False)
    whole = any(isinstance(rung, Whole) for rung in rungs)
    widest = _widest(units, forecaster, budget, prefixes) if whole else None
    if widest is not None:
        return widest

    def climb(unit: Unit, oversize: bool) -> Choice:
        return _climb(_plans(slot_groups(unit, prefixes), rungs, forecaster, by_cost), forecaster, budget, oversize)

    choice = climb(units[0], oversize)
    if choice.decision.outcome is not Outcome.REFUSED or not explain:
        return choice
    return replace(choice, remedy=_remedy(units[0], lambda unit: climb(unit, False)))


def consider(
    units: Sequence[Unit],
    rungs: Sequence[Rung],
    forecaster: Forecaster,
    budget: Budget,
    width: int,
    ordinal: int,
    *,
    oversize: bool = False,
    prefixes: Prefixes | None = None,
) -> Choice:
    """Decide on one plan that another rank proposed: ``width`` leading units whole, or plan ``ordinal`` of the first.

    The ladder is in its own order here, so that the ordinal means the same on every rank.
    """
    plans = _plans(slot_groups(units[0], prefixes), rungs, forecaster, by_cost=False)
    wide = Plan(Whole.name, slot_groups([shape for unit in units[:width] for shape in unit], prefixes))
    plan = plans[ordinal] if width == 1 else wide
    candidate, demand = _candidate(ordinal, plan, forecaster), forecaster.demand(plan)
    decision = decide([demand], budget, [candidate], oversize=oversize)
    chosen = None if decision.selected is None else plan
    return Choice(width, chosen, decision, budget, (candidate,), (demand,))


def with_figures(choice: Choice, forecaster: Forecaster) -> Choice:
    """Return an admitted choice with the full forecast of its plan, which limits alone had decided; decided again."""
    assert choice.plan is not None
    exact = forecaster.demand(choice.plan)
    demands = tuple(exact if each is choice.demand else each for each in choice.demands)
    decision = decide(demands, choice.budget, choice.candidates)
    chosen = choice.plan if decision.selected == choice.decision.selected else None
    return replace(choice, plan=chosen, decision=decision, demands=demands)


def unforecast(units: Sequence[Unit], budget: Budget, policy: str, prefixes: Prefixes | None = None) -> Choice:
    """Run the first unit whole and unseen, as a policy without forecasts does; nothing is known of what it takes."""
    plan = Plan(Whole.name, slot_groups(units[0], prefixes))
    candidate = Candidate(0, plan.rung, plan.indices, plan.packed_tokens)
    demand = Demand(budget.sample, Coverage.UNKNOWN, *(None,) * 6, uncovered=("everything",))
    return Choice(1, plan, admit_unseen(candidate, budget, policy), budget, (candidate,), (demand,))


def admit_unseen(candidate: Candidate, budget: Budget, policy: str) -> Decision:
    """Admit the only candidate, as a policy without forecasts does."""
    reason = f"policy {policy} admits without a forecast"
    chosen, rung = candidate.ordinal, candidate.rung
    return Decision(Outcome.ADMITTED, budget.sample, chosen, rung, None, budget.available, None, None, reason)


def _climb(plans: Sequence[Plan], forecaster: Forecaster, budget: Budget, oversize: bool) -> Choice:
    """Try plans in their order until one fits."""
    candidates: list[Candidate] = []
    demands: list[Demand] = []
    for ordinal, plan in enumerate(plans):
        candidates.append(_candidate(ordinal, plan, forecaster))
        demands.append(forecaster.demand(plan))
        if decide(demands[-1:], budget, candidates[-1:]).outcome is Outcome.ADMITTED:
            break
    decision = decide(demands, budget, candidates, oversize=oversize)
    chosen = None if decision.selected is None else plans[decision.selected]
    return Choice(1, chosen, decision, budget, tuple(candidates), tuple(demands))


def _remedy(unit: Unit, climb: Callable[[Unit], Choice]) -> str:
    """Find a smaller piece of a refused unit that would be admitted: fewer requests, or else a shorter one."""
    count = _largest(len(unit) - 1, lambda number: climb(unit[:number]).plan is not None)
    if count:
        tokens = sum(shape.length for shape in unit[:count])
        return f"give its first {count} requests ({tokens} tokens) alone"
    first = unit[0]
    length = _largest(first.length - 1, lambda number: climb((replace(first, length=number),)).plan is not None)
    if length:
        return f"shorten request {first.index} from {first.length} to at most {length} tokens"
    shortfall = climb((replace(first, length=1),)).decision.shortfall
    return f"lower the claims by {shortfall} B: they leave no room for a single token"


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to ``most`` that fits, 0 when none does; what fits stays fit when smaller."""
    low, high = 0, most + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _widest(units: Sequence[Unit], forecaster: Forecaster, budget: Budget, prefixes: Prefixes | None) -> Choice | None:
    """Find the largest number of leading units that fits whole: by doubling, then by halving the gap."""
    best: Choice | None = None
    low, high = 0, len(units) + 1
    width = 1
    while low + 1 < high:
        width = min(width, high - 1)
        choice = _whole(units[:width], forecaster, budget, prefixes)
        if choice is None:
            high = width
        else:
            best, low = choice, width
        width = 2 * low if high > len(units) else (low + high) // 2
    return best


def _whole(units: Sequence[Unit], forecaster: Forecaster, budget: Budget, prefixes: Prefixes | None) -> Choice | None:
    plan = Plan(Whole.name, slot_groups([shape for unit in units for shape in unit], prefixes))
    demand = forecaster.demand(plan)
    if demand.coverage is not Coverage.COVERED:
        return None
    candidate = _candidate(0, plan, forecaster)
    decision = decide([demand], budget, [candidate])
    if decision.outcome is not Outcome.ADMITTED:
        return None
    return Choice(len(units), plan, decision, budget, (candidate,), (demand,))


def _plans(groups: Sequence[Subforward], rungs: Sequence[Rung], forecaster: Forecaster, by_cost: bool) -> list[Plan]:
    plans = [plan for rung in rungs for plan in rung.plans(groups)]
    costs = [forecaster.cost_ns(plan) for plan in plans] if by_cost else []
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(plans):
        return plans
    return [plans[each] for each in sorted(range(len(plans)), key=lambda each: (known[each], each))]


def _candidate(ordinal: int, plan: Plan, forecaster: Forecaster) -> Candidate:
    return Candidate(ordinal, plan.rung, plan.indices, plan.packed_tokens, forecaster.cost_ns(plan))
